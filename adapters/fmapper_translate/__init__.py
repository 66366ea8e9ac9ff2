"""A model of PyTorch as source code for Flax NNX, transcribed from the source of its classes.

The model is made and called once while its source tells what each of its expressions gave and
which operations it ran. Statements, names, loops, conditions and constructors are the source's;
expressions on tensors are printed from the operations that were recorded there. Where both
disagree, or something has no counterpart, `NotTranscribed` says what.

functions   the functions of the source that ran, and their code with probes in it
recording   the table of what each expression gave and ran
expressions, statements, operations   how they are printed
calls       functions that become others
contexts    what stands after `with`
arrays      parameters and buffers
constructors/  what constructors are given and do
layers      the table of layers
flax/       layers and functions that files take along
fallback    functions by their operations
files       a file: classes, functions, helpers, `load_weights`
witness     the functions of a file that give something else than the source's
transcription   all of it, and the proof of a file
"""

from fmapper_translate.transcription import Transcription, transcribe
from fmapper_translate.walk.errors import NotTranscribed

__all__ = ["NotTranscribed", "Transcription", "transcribe"]
