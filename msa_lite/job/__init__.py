"""What a recipe comes to: models, data and questions, found, loaded and checked before anything is written."""

from msa_lite.job.prepare import Job as Job
from msa_lite.job.prepare import Plan as Plan
from msa_lite.job.prepare import prepare as prepare
from msa_lite.job.prompting import find_prompter as find_prompter
from msa_lite.job.prompting import prompt_settings as prompt_settings

__all__ = ["Job", "Plan", "find_prompter", "prepare", "prompt_settings"]
