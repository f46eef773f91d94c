"""Ask the models of a run a question: as they are stored, or the unlearned model at other strengths."""

from msa_lite.pipeline.ask.merged_points import MergedPoints
from msa_lite.pipeline.ask.panel import Answers, Panel, ask, open_panel
