"""Fitting vectors: fine-tune a prior on rows and keep the change, with the Hugging Face Trainer underneath."""

from msa_lite.train.fit.in_place import TuningMode, check_tunable, roomy_mode, tune
from msa_lite.train.fit.loop import VectorFit, epoch_folder
from msa_lite.train.fit.tracking import Line, Tracking, check_trackers
from msa_lite.train.fit.until import Until
from msa_lite.train.fit.vector import check_mode, fit_vector, run_fit
from msa_lite.train.objectives.objective import Objective
from msa_lite.train.settings import AfterEpoch, FitSettings, KeptEpochs, auto_rate
