"""The three ports of ``dispatch``, filled by Celery."""

from __future__ import annotations

from dispatch.ports import Ports
from tasks import events, offers

PORTS = Ports(offer=offers.publish, emit=events.emit, capacity=offers.capacity)
