"""Training states between frameworks: a model with its optimizer, and the schedule of its rate.

state     an optimizer as plain data: groups, settings, moments, counts, schedules of the step
convert   `convert_training`: the model first, then its optimizer by the same names
adapters  LoRA as functions of the parameters of a model
rules     changes of weights in a model that has them otherwise
peft_files  the folders of PEFT
"""

from fmapper.training.adapters import LoraAdapter, LowRank
from fmapper.training.convert import Training, convert_training
from fmapper.training.peft_files import load_adapter, save_adapter
from fmapper.training.state import ALGORITHMS, SCHEDULES, Group, OptimizerState, Schedule

__all__ = [
    "ALGORITHMS",
    "SCHEDULES",
    "Group",
    "LoraAdapter",
    "LowRank",
    "OptimizerState",
    "Schedule",
    "Training",
    "convert_training",
    "load_adapter",
    "save_adapter",
]
