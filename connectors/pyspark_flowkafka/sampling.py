"""How many bytes a record takes: what ``maxBytesPerTrigger`` needs to know before it reads.

No request tells the size of a range. So the driver fetches a little at the beginning of each
partition's next range and looks at the headers of its batches. The estimate is of bytes as they
are stored, compressed if the producer compressed them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark_flowkafka.batches import HEADER
from pyspark_flowkafka.client import KafkaClient
from pyspark_flowkafka.connections import retrying
from pyspark_flowkafka.offsets import TopicPartition
from pyspark_flowkafka.options import SourceOptions
from pyspark_flowkafka.records import Fetched, scan_fetch
from pyspark_flowkafka.replies import Status

SAMPLE_BYTES = 64 << 10


def bytes_per_offset(
    options: SourceOptions,
    start: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> dict[TopicPartition, float]:
    """Return about how many bytes each offset of a partition stands for, where something is new."""
    ahead = [one for one, end in latest.items() if one in start and end > start[one]]

    def ask(client: KafkaClient) -> dict[TopicPartition, float]:
        sent = {one: client.fetch(one, start[one], SAMPLE_BYTES) for one in ahead}
        sizes = {}
        for one, answer in sent.items():
            reply = client.fetched(answer)
            # Whatever is wrong shows when the range is read; then it is dealt with.
            if reply.status is Status.OK and (size := _size(reply.data, start[one])):
                sizes[one] = size
        return sizes

    return retrying(options.settings, "measuring records", ask) if ahead else {}


def _size(data: bytes, offset: int) -> float | None:
    headers = scan_fetch(Fetched(data, offset)).headers
    if not headers:
        return None
    offsets = headers[-1].last_offset - headers[0].base_offset + 1
    return max(headers[-1].end, HEADER.size) / offsets
