"""What the tests of ``flowkafka`` need: a real broker, and producers that are not ours."""
