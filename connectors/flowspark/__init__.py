"""What the Spark-facing packages share: everything that knows both Spark and flowstate."""

__version__ = "0.1.0"
