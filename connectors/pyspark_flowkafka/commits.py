"""Offsets of finished batches, committed to a consumer group for whoever watches its lag.

The query itself never reads them back, except with ``startingOffsets`` = ``committed`` in a new
query: its truth is Spark's checkpoint. So a commit that fails is a warning.
"""

from __future__ import annotations

import logging

from pyspark_flowkafka.client import KafkaClient
from pyspark_flowkafka.connections import client_for
from pyspark_flowkafka.errors import KafkaSourceError
from pyspark_flowkafka.offsets import Offsets
from pyspark_flowkafka.options import SourceOptions
from pyspark_flowkafka.replies import RetriableClientError

_LOG = logging.getLogger(__name__)

# A lag tool's figures are not worth a query's time: each batch commits anew.
_ATTEMPTS = 2


def commit(options: SourceOptions, offsets: Offsets) -> None:
    """Commit offsets to the group of ``kafka.group.id``; a failure is only written down."""
    group = options.settings.group_id or ""
    reason = ""
    for _ in range(_ATTEMPTS):
        try:
            client: KafkaClient = client_for(options.settings)
            client.commit(group, offsets)
        except RetriableClientError as error:
            reason = error.reason
        except KafkaSourceError as error:
            reason = str(error)
            break
        else:
            return
    _LOG.warning("[FLOWKAFKA_COMMIT] offsets were not committed to %r: %s", group, reason)
