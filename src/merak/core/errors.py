"""The errors a user can meet: each is one sentence that says what, the values, and the fix."""


class MerakError(ValueError):
    """Bad input, found by Merak; the base of every error below."""


class PackageError(MerakError):
    """A model that needs a package which is not installed."""


class MeshError(MerakError):
    """Degrees that do not fit the ranks, or `merak.init` missing or called twice."""


class TraceError(MerakError):
    """A model that cannot be traced, or that gives no loss."""


class ShardError(MerakError):
    """A tensor parallel degree or feature dict that does not fit the model."""


class PlanError(MerakError):
    """Segments that cannot be laid out over the stages."""


class ScheduleError(MerakError):
    """A schedule that is unknown, undefined for the sizes asked for, or wrong."""


class DataError(MerakError):
    """A dataset or batch that does not give the model what it needs."""


class ArgumentsError(MerakError):
    """A training argument that cannot be honoured."""


class WeightsError(MerakError):
    """Weights that cannot be created or loaded."""


class TrainingError(MerakError):
    """Training that cannot go on: a loss that is not finite, a transfer that never comes."""


class SavingError(WeightsError, TrainingError):
    """Files that cannot be written: a full disk, a folder that has become read-only."""
