"""Which folders a remote caller may name as the source of an adapter, and what he is told of them.

Invariant: what `resolve` returns lies in one of the roots with all symlinks followed, and neither an error
nor `shown` discloses where the roots are.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.adapter_folder import confined
from serving.outputs import AdapterStatus


class AdapterRoots:
    """roots: folders whose adapters may be loaded by remote callers; none allows no such load."""

    def __init__(self, roots: Sequence[str | Path] = ()):
        for root in roots:
            if not Path(root).is_dir():
                raise ConfigError(f"adapter root {str(root)!r} is not a folder; allowed: an existing folder")
        self.folders = tuple(Path(root).resolve() for root in roots)

    def resolve(self, source: str) -> Path:
        """The folder that a caller means: below a root, or a full path into one.

        Raises AdapterFormatError for any other, there or not; ConfigError without roots.
        """
        if not self.folders:
            raise ConfigError("no adapter can be loaded by remote callers; the server needs an adapter root")
        if not source:
            raise AdapterFormatError("the source of the adapter is empty; allowed: a folder on the server")
        places = [confined(root / source, self.folders) for root in self.folders]  # a full path stays itself
        folder = next((place for place in places if os.path.isdir(place)), None)
        if folder is None:
            raise AdapterFormatError(f"there is no folder {source!r:.80} to load from")
        return folder

    def shown(self, status: AdapterStatus) -> AdapterStatus:
        """A status without the server's own folders in its source."""
        path = Path(status.source)
        if not path.is_absolute():
            return status
        below = [path.relative_to(root) for root in self.folders if path.is_relative_to(root)]
        return dataclasses.replace(status, source=str(below[0]) if below else path.name)
