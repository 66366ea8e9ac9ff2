"""Files for PyTorch, of models of Flax NNX.

arguments       what constructors were given
transcription   all of it
"""
