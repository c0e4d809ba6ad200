"""Registers the backend "pydist" of torch.distributed whenever torch is imported.

The entry point of pyproject.toml, in the group torch.backends, names autoload(). Imports nothing of
pydist: what is wrong with it is said when a group of this backend is made.
"""

from typing import Any

_NAME = "pydist"


def autoload() -> None:
    """Called by `import torch`. Cheap, and never raises, as torch could not be imported then."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, _NAME.upper()):
            dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
    except Exception:  # such a torch is not one that pydist can be built for
        return


def _create(options: Any, backend_options: Any = None) -> Any:
    from pydist.backend import create

    return create(options, backend_options)
