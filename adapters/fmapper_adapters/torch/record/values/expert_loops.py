"""Records loops over selected experts as loops over all experts, so that inputs may differ.

    hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
    for expert in hit:
        choice, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, experts(x[token], expert) * weights[token, choice, None])

The body runs for each expert; `torch.where` finds no row for an expert that is not hit. The program
is equivalent only if the body does nothing but add such rows. This is proved for each loop, or the
recording is abandoned: the code must not carry a name from one iteration to another, and the
computation must not carry a tensor, nor write anything but such rows to outer tensors. A block
under a condition that such a row exists (`row_questions`) counts as one iteration.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from fmapper_adapters import torch as adapters
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record.values import asserts, loop_proof, row_questions
from fmapper_adapters.torch.record.values.loop_proof import NotProved
from fmapper_adapters.torch.record.values.row_questions import Question

_Tensor = torch.Tensor
_Place: TypeAlias = tuple[types.CodeType, int, int]
_NOT_CALLERS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, adapters))
_NONZERO: set[Any] = {torch.nonzero, _Tensor.nonzero}
_PLACES: set[Any] = {torch.where, _Tensor.where, *_NONZERO}
_SHAPE: Any = _Tensor.shape.__get__  # type: ignore[attr-defined] # another object each time
_SIZES: set[Any] = {_Tensor.numel, _Tensor.size, _Tensor.__len__, _SHAPE}
_ASKS: set[Any] = {*_SIZES, _Tensor.any, _Tensor.sum, torch.any, torch.sum}
_ADDS: set[Any] = {_Tensor.index_add_, _Tensor.index_put_, _Tensor.__setitem__}


class MissingExpert(Exception):
    """Raised if an iteration uses an expert that does not exist.

    Masks often have an additional row for dropped tokens.
    """


def has_expert_loops(module: torch.nn.Module) -> bool:
    """Returns whether the code of a module may contain loops over experts."""
    sources = loop_proof.sources_of(module)
    return any("nonzero" in text or row_questions.has_questions(text) for text in sources)


def visit_all_experts(forward: Callable[..., Any], missing: set[_Place]) -> Callable[..., Any]:
    """Makes a forward function that visits all experts in its loops.

    Args:
        forward: The original function.
        missing: The iterations to leave out, for experts that do not exist; the program asserts
            that they are not hit. A call adds those that it encounters.

    Raises:
        NotProved: During a call: a loop does more than add rows.
        MissingExpert: During a call: `missing` has grown, so call again.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        loops = _Loops(missing)
        try:
            with loops:
                result = forward(*args, **kwargs)
            loops.end_iteration()
        except IndexError as error:
            place = None if loops.iteration is None else loops.iteration.place
            if place is None or place in missing:
                raise
            missing.add(place)
            raise MissingExpert(str(error)) from error
        if not loops.met:
            raise NotProved("there is no loop over the indices of true elements")
        loops.refuse_own(result)
        return result

    return run


class _Loops(TorchFunctionMode):
    """Observes the operations of a call.

    Attributes:
        met: Whether there was a loop.
        hits: Id -> the result of nonzero for a row of bools, and that row.
        past: The memory of tensors that were computed in finished iterations.
        iteration: The current iteration.
        missing: Iterations that are left out.
    """

    def __init__(self, missing: set[_Place]) -> None:
        super().__init__()
        self.met = False
        self.missing = missing
        self.hits: dict[int, tuple[_Tensor, _Tensor]] = {}
        self.past: set[int] = set()
        self.kept: list[_Tensor] = []  # keeps memory from being reused
        self.iteration: _Iteration | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and (answer := self._answer(func, args)) is not None:
            return answer
        if self.iteration is not None and self.iteration.is_over():
            self.end_iteration()
        if self.iteration is not None:
            return self.iteration.call(func, args, kwargs)
        self.refuse_own((args, kwargs))
        if func is _Tensor.unbind and args and id(args[0]) in self.hits:
            frame = _caller()
            if args[1:] in ((), (0,)) and not kwargs:
                return _Iterations(self, self.hits[id(args[0])][1], frame)
        result = func(*args, **kwargs)
        is_row = func in _NONZERO and isinstance(result, _Tensor) and args and args[0].ndim == 1
        if is_row and isinstance(args[0].shape[0], int):
            self.hits[id(result)] = (result, args[0])
        return result

    def _answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answers that a row exists, if the answer does not matter; begins an iteration."""
        if self.iteration is not None and self.iteration.lines is None:
            return None
        frame = _caller()
        question = row_questions.question_at(frame)
        if question is None or not args or id(frame.f_locals.get(question.name)) != id(args[0]):
            return None
        rows: _Tensor = args[0]
        if (func in _SIZES) == question.is_mask:
            return None
        if question.is_mask:
            if rows.dtype is not torch.bool:
                return None
        elif not rows.ndim or not _is_unbacked(_size(rows)):
            return None
        if self.iteration is not None:
            if not self.iteration.is_over(asking=True):
                return None
            self.end_iteration()
        self.refuse_own(rows)
        self.met = True
        self.iteration = _Iteration(self, None, frame, set(), None, question)
        if question.is_mask:
            self.iteration.masks.append(rows)
        else:
            self.iteration.rows.add(_size(rows))
        return _one_row(func, rows)

    def end_iteration(self) -> None:
        """Ends the current iteration; its tensors must not be used afterwards."""
        if self.iteration is not None:
            self.past |= self.iteration.made
            self.kept += self.iteration.kept
        self.iteration = None

    def refuse_own(self, tree: Any) -> None:
        """Raises if a tensor of one iteration is used in another."""
        if self.past and any(_memory(x) in self.past for x in _tensors(tree)):
            raise NotProved("a tensor of one iteration is used outside of it")


class _Iterations:
    """The iterable that replaces the indices in a loop."""

    def __init__(self, loops: _Loops, hit: _Tensor, frame: types.FrameType) -> None:
        self.loops, self.hit, self.frame = loops, hit, frame
        self.asked = loop_proof.prove(frame)

    def __iter__(self) -> Iterator[_Tensor]:
        loops = self.loops
        loops.met = True
        hit = self.hit != 0
        line = self.frame.f_lineno
        for expert in range(self.hit.shape[0]):
            place = self.frame.f_code, line, expert
            if place in loops.missing:
                _private.assert_async(~hit[expert], f"expert {expert} is hit but does not exist")
                continue
            index = torch.tensor([expert])
            iteration = _Iteration(loops, hit[expert], self.frame, self.asked, place)
            loops.iteration = iteration
            yield index
            loops.end_iteration()


class _Some(int):
    """A nonzero count, which only means that there are rows."""

    def item(self) -> int:
        return int(self)


class _Iteration:
    """The iteration for one expert, or a block under a condition that rows exist.

    Attributes:
        is_hit: Whether the expert is hit; None for a block under a condition.
        asked: The lines that continue with the next expert if there is no row.
        place: The code and the line of the loop, and the number of the expert.
        lines: The lines under the condition.
        masks: Masks with a true element for each row.
        made: The memory of tensors that were computed in it.
        others: The memory of its other operands.
        rows: The sizes of the indices that it uses.
        left_out: The sizes of rows for which it ends early.
    """

    def __init__(
        self,
        loops: _Loops,
        is_hit: _Tensor | None,
        frame: types.FrameType,
        asked: set[int],
        place: _Place | None,
        question: Question | None = None,
    ) -> None:
        self.loops, self.is_hit, self.frame, self.asked = loops, is_hit, frame, asked
        self.place = place
        self.lines = None if question is None else question.lines
        self.masks: list[_Tensor] = []
        self.made: set[int] = set()
        self.others: set[int] = set()
        self.kept: list[_Tensor] = []
        self.rows: set[Any] = set()
        self.left_out: set[Any] = set()

    def is_over(self, *, asking: bool = False) -> bool:
        """Returns whether the block under a condition is finished.

        Args:
            asking: Whether the frame evaluates the condition again, which may be inside the block.
        """
        if self.lines is None:
            return False
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        if frame is None:
            return True
        first, last = self.lines
        return not first <= frame.f_lineno <= last or (asking and _caller() is frame)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _tensors((args, kwargs))
        self.loops.refuse_own(given)
        self.others |= {_memory(x) for x in given} - self.made
        if func in _SIZES and self._ends_early(args[0]):
            return _one_row(func, args[0])
        if asserts.is_written(func, args):  # as part of a module name
            number = args[0].item()
            if not isinstance(number, int):
                raise NotProved("a number other than that of the expert is formatted")
            return format(number, *args[1:])
        before = [_private.version_of(x) for x in given]
        looks = func in _PLACES and len(args) == 1 and not kwargs.keys() - {"as_tuple"}
        if looks and self.is_hit is not None:
            condition = args[0] if args[0].dtype is torch.bool else args[0] != 0
            args = (condition & self.is_hit,)
        elif self.is_hit is None:
            looks = looks or func is _Tensor.__getitem__
            looks = looks and any(self._is_mask(x) for x in args[:2])
        result = func(*args, **kwargs)
        made = _tensors(result)
        if looks:
            self.rows |= {_size(x) for x in made if x.ndim}
        changed = [
            x for x, version in zip(given, before, strict=True) if _private.version_of(x) != version
        ]
        name = getattr(func, "__name__", "")
        if func in _ADDS or (name.endswith("_") and not name.endswith("__")):
            changed += given[:1]
        if any(_memory(x) not in self.made for x in changed) and not self._adds(func, args, kwargs):
            raise NotProved(f"{name or func} writes to a tensor from outside")
        self.made |= {_memory(x) for x in made} - self.others
        self.kept += made
        return result

    def _adds(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a call writes only rows of the current expert: none if it is not hit."""
        if func not in _ADDS or kwargs.keys() - {"alpha"}:
            return False
        if func is _Tensor.index_add_:
            indices: tuple[Any, ...] = args[2:3]
        else:
            indices = tuple(args[1]) if isinstance(args[1], tuple | list) else args[1:2]
        if any(self._is_mask(x) for x in indices):
            return sum(isinstance(x, _Tensor) for x in indices) == 1
        sizes = {_size(x) for x in indices if isinstance(x, _Tensor) and x.ndim == 1}
        if not sizes & self.rows:
            return False
        return not self.left_out or self.left_out == sizes & self.rows

    def _is_mask(self, x: Any) -> bool:
        return any(x is mask or _has_elements_of(x, mask) for mask in self.masks)

    def _ends_early(self, x: _Tensor) -> bool:
        """Returns whether a line that asks for a size ends iterations without rows."""
        frame = _caller()
        if frame.f_code is not self.frame.f_code or frame.f_lineno not in self.asked:
            return False
        if x.ndim != 1 or _size(x) not in self.rows:
            raise NotProved("an iteration ends early for a reason other than having no rows")
        self.left_out.add(_size(x))
        return True


def _one_row(func: Any, rows: _Tensor) -> Any:
    """Returns the answer of a function that counts rows, if there were one."""
    return (_Some(1), *rows.shape[1:]) if func == _SHAPE else _Some(1)


def _size(x: _Tensor) -> Any:
    """Returns the symbol of the first size, or a unique object."""
    size = x.shape[0]
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else object()


def _is_unbacked(size: Any) -> bool:
    """Returns whether a size depends on values."""
    return isinstance(size, sympy.Symbol) and str(size)[:1] == "u"


def _tensors(tree: Any) -> list[_Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, _Tensor)]


def _has_elements_of(x: Any, mask: _Tensor) -> bool:
    """Returns whether a tensor is a mask in another shape: a view of all of its elements."""
    if not isinstance(x, _Tensor) or x.dtype is not torch.bool or _memory(x) != _memory(mask):
        return False
    whole = x.is_contiguous() and mask.is_contiguous()
    return whole and statically_known_true(x.numel() == mask.numel())


def _memory(x: _Tensor) -> int:
    identity: int = _private.identity_of(x.untyped_storage())
    return identity


def _caller() -> types.FrameType:
    """Returns the frame outside of torch and of the adapters that calls a function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    return frame
