"""Holds the codec of what crosses between stages: every value comes back as it was, on another
rank too; what cannot travel is named, with its place in the value.
"""

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pydist import UsageError
from pydist._C import testing


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass
class Hidden:
    states: Any
    mask: Any = None
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.derived = "of __post_init__"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """Built like transformers' ModelOutput: fields that are not None are items too."""

    logits: Any = None
    cache: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Color(enum.IntEnum):
    RED = 1


def there_and_back(value: Any) -> Any:
    structure, tensors = testing.encode_value(value)
    return testing.decode_value(structure, tensors)


PLAIN = [
    None, True, False, 0, -1, 1, 63, 64, -64, -65, 2**63 - 1, -(2**63), 2**63, -(2**64), 10**40,
    -(10**40), 0.0, -0.0, 1.5, float("inf"), 1e-320, 1 + 2j, "", "text", "ü\0\U0001f600", "\udc80",
    b"", b"\0\xff", torch.float16, torch.bool, torch.device("cpu"), torch.device("cuda", 1),
    torch.Size([]), torch.Size([2, 3]), (), (1,), [], [1, [2, (3,)]], {}, {"b": 1, "a": 2},
    {1: "x", (2, None): "y"}, collections.OrderedDict([("b", 1), ("a", 2)]), Point(1, "y"),
    Frozen((1, 2)), "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_with_their_type(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)  # the sign of zero, the order of dicts


def test_nan_comes_back() -> None:
    back = there_and_back(float("nan"))
    assert back != back


def test_numbers_of_numpy_that_are_python_numbers_come_back_as_these() -> None:
    """numpy.float64 is a float, and what a sum or a mean in a forward often gives."""
    for value, plain in ((np.float64(1.5), 1.5), (np.complex128(1 + 2j), 1 + 2j)):
        found = testing.decode_value(*testing.encode_value([value]))
        assert found == [plain]
        assert type(found[0]) is type(plain)


def test_tensors_keep_their_identity_and_place() -> None:
    a, b = torch.randn(2, requires_grad=True), torch.tensor(3)
    value = {"first": (a, [b, a]), "scalar": b}
    structure, tensors = testing.encode_value(value)
    assert [id(tensor) for tensor in tensors] == [id(a), id(b)]
    back = testing.decode_value(structure, tensors)
    assert list(back) == ["first", "scalar"]
    assert back["first"][0] is back["first"][1][1]
    assert back["first"][0] is a
    assert back["scalar"] is back["first"][1][0]


def test_a_parameter_is_a_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert there_and_back((parameter,))[0] is parameter


def test_what_torch_returns_from_max() -> None:
    values = torch.max(torch.tensor([[1.0, 3.0]]), 1)
    back = there_and_back(values)
    assert type(back) is type(values)
    assert back.indices is values.indices


def test_dataclasses_are_made_without_their_constructor() -> None:
    tensor = torch.ones(2)
    value = Hidden(tensor, mask=[1])
    value.size = 7
    value.derived = "changed"
    value.extra = {"k": tensor}  # type: ignore[attr-defined]
    back = there_and_back(value)
    assert type(back) is Hidden
    assert (back.mask, back.size, back.derived) == ([1], 7, "changed")
    assert back.states is tensor
    assert back.extra["k"] is tensor


def test_a_field_that_is_not_set_stays_unset() -> None:
    value = Hidden(1)
    del value.states
    assert not hasattr(there_and_back(value), "states")


def test_a_dataclass_that_is_a_dict_too() -> None:
    """transformers' ModelOutput: attributes and items are the same objects."""
    logits = torch.ones(2)
    value = Output(logits=logits, cache=(torch.zeros(1), 3))
    back = there_and_back(value)
    assert type(back) is Output
    assert list(back) == ["logits", "cache"]
    assert back.logits is back["logits"]
    assert back.logits is logits
    assert back.loss is None
    assert back.cache[1] == 3


def local_class() -> Any:
    @dataclasses.dataclass
    class Inner:
        value: int = 0

    return Inner()


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2}]}, ["set", "value['a'][1]"]),
        ((object(),), ["object", "value[0]"]),
        ([Color.RED], ["test_value_codec.Color", "value[0]"]),
        (Hidden(object()), ["object", "value.states"]),
        ({object(): 1}, ["object", "value[<object"]),
        ([torch.eye(2).to_sparse()], ["Sparse", "value[0]", "dense"]),
        ([torch.ones(1).as_subclass(Subclass)], ["Subclass", "value[0]"]),
        (collections.defaultdict(int), ["collections.defaultdict"]),
        ([local_class()], ["Inner", "value[0]", "top level"]),
        (lambda: 0, ["function"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        testing.encode_value(value)
    for word in words:
        assert word in str(error.value)


def test_a_value_that_holds_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError):
        testing.encode_value(value)


def test_a_message_that_ends_too_early() -> None:
    structure, tensors = testing.encode_value(("text", 1.5, torch.ones(1)))
    for length in range(len(structure)):
        with pytest.raises(RuntimeError, match="too early"):
            testing.decode_value(structure[:length], tensors)


@dataclasses.dataclass
class Lazy:
    value: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise KeyError("not there yet")
        return super().__getattribute__(name)


def test_an_error_of_a_field_is_not_swallowed() -> None:
    with pytest.raises(KeyError, match="not there yet"):
        testing.encode_value([Lazy()])


def test_nothing_is_left_behind() -> None:
    """Reference counts of what was encoded, and of the classes, are as before."""
    import sys

    tensor = torch.ones(1)
    value = {"k": [tensor, Hidden(tensor), Output(logits=tensor), Point(tensor)]}
    there_and_back(value)
    kept = [tensor, Hidden, Output, Point, value, value["k"]]
    before = [sys.getrefcount(each) for each in kept]
    for _ in range(10):
        there_and_back(value)
    assert [sys.getrefcount(each) for each in kept] == before
