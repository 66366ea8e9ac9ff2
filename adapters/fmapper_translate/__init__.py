"""A model as source code for another framework, transcribed from the source of its classes.

Models of PyTorch become files for Flax NNX or Equinox, and models of Flax NNX and
Linen files for PyTorch. The model is
made and called once while its source tells what each of its expressions gave and, of PyTorch,
which operations it ran. Statements, names, loops, conditions and constructors are the source's;
expressions on arrays are printed from the operations that were recorded there, or from the table
of functions. Where both disagree, or something has no counterpart, `NotTranscribed` says what.

sources/    the frameworks of models
walk/       what is the same for all frameworks
torch/      files for PyTorch, of models of Flax NNX, and in `linen/` of Flax Linen

The rest is for models of PyTorch:

functions   the functions of the source that ran, and their code with probes in it
recording   the table of what each expression gave and ran
expressions, statements, operations   how they are printed
calls       functions that become others
contexts    what stands after `with`
arrays      parameters and buffers
slots       attributes that are there within a call alone
constructors/  what constructors are given and do
targets/    the frameworks of files, and what these have in common
flax/, equinox/  each of them
fallback    functions by their operations
files       a file: classes, functions, helpers, `load_weights`
witness     the functions of a file that give something else than the source's
transcription   all of it, and the proof of a file
"""

from fmapper_translate.transcription import Transcription, transcribe
from fmapper_translate.walk.errors import NotTranscribed

__all__ = ["NotTranscribed", "Transcription", "transcribe"]
