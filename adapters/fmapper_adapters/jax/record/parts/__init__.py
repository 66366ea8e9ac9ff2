"""Which submodules a model calls, with which arguments and results.

calls      marks the calls while a model is traced
functions  does so for functions that take a container of the model's arrays
reader     finds the marks in the jaxpr
"""

from fmapper_adapters.jax.record.parts.calls import PartCalls as PartCalls
from fmapper_adapters.jax.record.parts.calls import PartScopes as PartScopes
from fmapper_adapters.jax.record.parts.calls import call_and_note as call_and_note
from fmapper_adapters.jax.record.parts.calls import is_noting as is_noting
from fmapper_adapters.jax.record.parts.calls import mark as mark
from fmapper_adapters.jax.record.parts.calls import note_call as note_call
from fmapper_adapters.jax.record.parts.calls import part_in as part_in
from fmapper_adapters.jax.record.parts.calls import record_calls as record_calls
from fmapper_adapters.jax.record.parts.calls import scope_in as scope_in
from fmapper_adapters.jax.record.parts.calls import watch as watch
from fmapper_adapters.jax.record.parts.functions import watch_functions as watch_functions
from fmapper_adapters.jax.record.parts.reader import PartReader as PartReader
