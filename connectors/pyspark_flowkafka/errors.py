"""Errors of ``format("flowkafka")``.

::

    ConnectorError                   flowspark.errors
    ├── OptionError                  FLOWKAFKA_OPTION: an option, or two that contradict
    └── KafkaSourceError             everything that the cluster or its data can do
        ├── UnavailableError         FLOWKAFKA_UNAVAILABLE: no broker answered in time
        ├── AuthenticationError      FLOWKAFKA_AUTHENTICATION: user, password or certificate
        ├── AuthorizationError       FLOWKAFKA_AUTHORIZATION: the user may not do this
        ├── UnknownTopicError        FLOWKAFKA_UNKNOWN_TOPIC: there is no such topic or partition
        ├── DataLossError            FLOWKAFKA_DATA_LOSS: offsets that are no longer in the log
        ├── BadRecordError           FLOWKAFKA_BAD_RECORD: a record batch that cannot be decoded
        └── RestoreSourceError       FLOWKAFKA_RESTORE: ``restoreFrom`` names nothing to go on from

Messages never hold a password: what a client library says is repeated only by its kind.
"""

from __future__ import annotations

from flowspark.errors import ConnectorError

FORMAT = "flowkafka"


class KafkaSourceError(ConnectorError):
    """Something of the cluster or of its data is not as the query needs it."""

    kind = "ERROR"

    def __init__(self, message: str, format_name: str = FORMAT) -> None:
        super().__init__(format_name, message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.format_name), self.__dict__


class UnavailableError(KafkaSourceError):
    """No broker answered, or none leads the partition; the batch may be run again."""

    kind = "UNAVAILABLE"


class AuthenticationError(KafkaSourceError):
    """The cluster refused the user or the certificate."""

    kind = "AUTHENTICATION"


class AuthorizationError(KafkaSourceError):
    """The user is known but may not read this topic or group."""

    kind = "AUTHORIZATION"


class UnknownTopicError(KafkaSourceError):
    """A topic or a partition that was asked for is not there."""

    kind = "UNKNOWN_TOPIC"


class DataLossError(KafkaSourceError):
    """Records that the query should have read are gone, and ``failOnDataLoss`` is true."""

    kind = "DATA_LOSS"


class BadRecordError(KafkaSourceError):
    """A record batch is damaged or of an unknown format, and ``onBadRecord`` is ``fail``."""

    kind = "BAD_RECORD"


class RestoreSourceError(KafkaSourceError):
    """``restoreFrom`` does not lead to offsets."""

    kind = "RESTORE"
