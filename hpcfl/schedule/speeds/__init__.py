"""How slow each client is. A new file with a named model is found by itself."""

from hpcfl.base.plugins import lookup, registered
from hpcfl.schedule.speeds.base import Speed

__all__ = ["Speed", "speed_class", "speeds"]


def speeds() -> dict[str, str]:
    """Return ``{name: module}`` of the speed models there are."""
    return registered("hpcfl.schedule.speeds", Speed, "model")


def speed_class(name: str) -> type[Speed]:
    """Return the speed model called `name`; UsageError names the nearest where there is none."""
    return lookup("hpcfl.schedule.speeds", Speed, name, "speed.model", "model")
