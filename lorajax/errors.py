"""One tree of typed errors for all packages.

A message names the thing, what was found and what is allowed. It never prints a whole tensor, and
never a folder of the machine that serves.
"""


class LoraJaxError(Exception):
    """Root of every error that lorajax raises on purpose."""


class ConfigError(LoraJaxError, ValueError):
    """A setting has a value, or a combination of values, that is not allowed."""


class CheckpointError(LoraJaxError, ValueError):
    """A base-model checkpoint cannot be read, or not be served."""


class AdapterFormatError(LoraJaxError, ValueError):
    """An adapter's files or arrays cannot be applied in full to the base model."""


class AdapterNotFound(LoraJaxError, LookupError):
    """No adapter is registered under that name."""


class AdapterExists(LoraJaxError):
    """The name is taken by an adapter from another source."""


class AdapterBusy(LoraJaxError):
    """Requests still run on the adapter."""


class AdapterCapacityError(LoraJaxError):
    """The adapter, or one adapter more, does not fit the configured limits."""


class RequestRejected(LoraJaxError, ValueError):
    """The request can never be served as it stands."""


class QueueFull(RequestRejected):
    """As many requests wait as may; the same one can be accepted later."""


class EngineClosed(LoraJaxError):
    """The engine was closed, or stopped by an error that its cause names."""
