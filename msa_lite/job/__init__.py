"""What a recipe comes to: models, data and questions, found, loaded and checked before anything is written."""

from msa_lite.job.prepare import Job as Job
from msa_lite.job.prepare import Plan as Plan
from msa_lite.job.prepare import prepare as prepare

__all__ = ["Job", "Plan", "prepare"]
