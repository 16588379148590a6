"""Places that the driver and the executors must both see."""

from __future__ import annotations

import os

import pytest

from flowspark.errors import OptionError
from flowspark.locations import absolute_location, shared_location


@pytest.mark.parametrize(
    "location", ["s3://bucket/out", "file:/tmp/out", "hdfs://x/y", "s3:bucket/out", "/tmp/out"]
)
def test_what_means_the_same_everywhere_stays_as_it_is(location: str) -> None:
    assert absolute_location(location) == location


@pytest.mark.parametrize("location", ["s3", "a:b", "out/x", "../out", "12:30/out"])
def test_a_local_path_is_made_absolute(location: str) -> None:
    assert absolute_location(location) == os.path.abspath(location)


@pytest.mark.parametrize("location", ["memory://there", "MEMORY:/there", " memory:x"])
def test_the_memory_of_one_process_is_refused(location: str) -> None:
    with pytest.raises(OptionError, match="option 'path' must be seen by the driver and the exec"):
        shared_location("flowtest", "option 'path'", location)
