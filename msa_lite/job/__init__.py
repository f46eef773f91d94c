"""What a recipe comes to: models, data and questions, found, loaded and checked before anything is written."""

from msa_lite.job.models import WRITTEN_OUT as WRITTEN_OUT
from msa_lite.job.models import fit_prior as fit_prior
from msa_lite.job.models import whole_target as whole_target
from msa_lite.job.prepare import Job as Job
from msa_lite.job.prepare import Plan as Plan
from msa_lite.job.prepare import prepare as prepare
from msa_lite.job.prompting import find_prompter as find_prompter
from msa_lite.job.prompting import prompt_settings as prompt_settings

__all__ = [
    "WRITTEN_OUT",
    "Job",
    "Plan",
    "find_prompter",
    "fit_prior",
    "prepare",
    "prompt_settings",
    "whole_target",
]
