"""A user's app with a static ``beat_schedule``: an ordinary task each second."""

from __future__ import annotations

from tasks import app

app.conf.beat_schedule = {
    "each-second": {"task": "support.tick", "schedule": 1.0, "options": {"queue": "static"}},
}
