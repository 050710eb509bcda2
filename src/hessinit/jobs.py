"""Jobs whose results are kept in a folder: after an interruption the same call continues."""

from __future__ import annotations

from hessinit.progress import report_progress as report_progress
from hessinit.training.jobs import Job as Job
from hessinit.training.jobs import JobFolder as JobFolder
from hessinit.training.loop import derive as derive
from hessinit.training.loop import generator as generator
from hessinit.training.loop import reproducible as reproducible
