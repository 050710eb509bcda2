"""Jobs whose results are kept in a folder: after an interruption the same call continues."""

from __future__ import annotations

from hessinit.progress import report_progress as report_progress
from hessinit.training.data import derive as derive
from hessinit.training.data import generator as generator
from hessinit.training.data import reproducible as reproducible
from hessinit.training.job_folder import JobFolder as JobFolder
from hessinit.training.workers import Job as Job
