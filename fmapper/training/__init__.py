"""Training states between frameworks: a model with its optimizer, and the schedule of its rate.

state     an optimizer as plain data: groups, settings, moments, counts
schedule  learning rates as functions of the step
convert   `convert_training`: the model first, then its optimizer by the same names
adapters  LoRA as functions of the parameters of a model
places    where adapted weights are in a model that has them otherwise
files     the folders of PEFT
"""

from fmapper.training.adapters import LoraAdapter, LowRank
from fmapper.training.convert import Training, convert_training
from fmapper.training.peft_files import load_adapter, save_adapter
from fmapper.training.schedule import Schedule
from fmapper.training.state import SETTINGS, Group, OptimizerState, check_settings

__all__ = [
    "SETTINGS",
    "Group",
    "LoraAdapter",
    "LowRank",
    "OptimizerState",
    "Schedule",
    "Training",
    "check_settings",
    "convert_training",
    "load_adapter",
    "save_adapter",
]
