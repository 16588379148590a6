"""Apache Kafka itself, fetched once by the Ivy that comes with pyspark, and kept in a cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pyspark

KAFKA = ("org.apache.kafka", "kafka_2.13", "4.3.1")
_FETCH_SECONDS_MAX = 280.0


def cache_folder() -> Path:
    """Return where downloads are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "flowspark-tests"


def java() -> str:
    """Return the Java that Spark would use."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def kafka_jars() -> Path:
    """Return the folder with the broker's jars; the first call of all fetches them."""
    return fetched(KAFKA)


def fetched(artifact: tuple[str, str, str], *, is_transitive: bool = True) -> Path:
    """Return a folder with an artifact and, if asked for, what it depends on."""
    name = "-".join(artifact[1:])
    cache = cache_folder()
    folder = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    # Tests run in several processes; one of them fetches, the others wait.
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            part = cache / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            _retrieve(artifact, part, cache / "ivy", is_transitive)
            part.rename(folder)
    return folder


def _retrieve(
    artifact: tuple[str, str, str], folder: Path, ivy_cache: Path, is_transitive: bool
) -> None:
    spark_jars = Path(pyspark.__file__).parent / "jars" / "*"
    pattern = f"{folder}/[artifact]-[revision](-[classifier]).[ext]"
    command = [java(), "-cp", str(spark_jars), "org.apache.ivy.Main", "-cache", str(ivy_cache)]
    command += ["-dependency", *artifact, "-confs", "default", "-retrieve", pattern]
    # Some of the broker's jars are published as bundles.
    command += ["-types", "jar", "bundle"]
    if not is_transitive:
        command.append("-notransitive")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS_MAX)
    if done.returncode != 0 or not any(folder.glob("*.jar")):
        raise RuntimeError(f"Ivy could not fetch {artifact}: {done.stdout[-2000:]}{done.stderr}")
