"""What a recipe comes to: models, data and questions, found, loaded and checked before anything is written."""

from msa_lite.job.models import WRITTEN_OUT as WRITTEN_OUT
from msa_lite.job.models import fit_prior as fit_prior
from msa_lite.job.models import whole_target as whole_target
from msa_lite.job.prepare import Job as Job
from msa_lite.job.prepare import Plan as Plan
from msa_lite.job.prepare import prepare as prepare

__all__ = ["WRITTEN_OUT", "Job", "Plan", "fit_prior", "prepare", "whole_target"]
