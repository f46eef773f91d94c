"""Fitting vectors: fine-tune a prior on rows and keep the change, with the Hugging Face Trainer underneath."""

from msa_lite.train.fit import VectorFit, check_mode, fit_vector, run_fit
from msa_lite.train.in_place import TuningMode, check_tunable, roomy_mode, tune
from msa_lite.train.loop import epoch_folder
from msa_lite.train.settings import AfterEpoch, FitSettings, KeptEpochs, Objective, auto_rate
from msa_lite.train.tracking import Line, Tracking, check_trackers
from msa_lite.train.until import Until
