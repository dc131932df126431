"""The errors of a sync between workers. A bad argument raises a plain ValueError."""


class SyncError(RuntimeError):
    """A sync could not be completed; the global model is what it was before."""


class ConsensusError(SyncError):
    """The workers must hold the same global model, and their global models differ."""


class NonFiniteError(SyncError):
    """A worker brought a model with inf or nan to a sync."""
