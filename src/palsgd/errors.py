"""What can go wrong between workers. Bad arguments are plain ValueErrors."""


class SyncError(RuntimeError):
    """A sync could not be completed; the global model is what it was before."""


class ConsensusError(SyncError):
    """Workers that must hold the same global model do not."""


class NonFiniteError(SyncError):
    """A worker brought a model with inf or nan to a sync."""
