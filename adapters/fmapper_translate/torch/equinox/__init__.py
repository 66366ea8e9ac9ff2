"""Files for PyTorch, of models of Equinox.

tables   what stands for layers of Equinox
layers   layers that PyTorch does not have; files take them along
arguments   what constructors were given
files    what is Equinox's in the walk of the source
transcription   all of it
"""
