"""Workers that may leave and come while training goes on."""

from palsgd.transports.elastic.transport import ElasticTransport

__all__ = ["ElasticTransport"]
