"""Properties of the pure cores that hold for every input: layout, bitmaps, block allocator."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pydist._C import testing

FLOAT_NBYTES = 4
ALIGNMENT = 64

sizes_and_order = st.lists(st.integers(0, 3000), max_size=40).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))
)


@given(
    sizes_and_order,
    st.integers(1, 16000),
    st.lists(st.integers(1, 16000), min_size=1, max_size=4),
)
def test_a_layout_holds_every_parameter_once_without_gaps(
    given_sizes: tuple[list[int], list[int]], alone: int, caps: list[int]
) -> None:
    """Every parameter with elements is in one unit, units are dense, and caps close buckets."""
    sizes, order = given_sizes
    units = testing.layout(sizes, order, alone, caps)
    num_buckets = 0
    placed = [parameter for _, _, members in units for parameter, _ in members]
    assert sorted(placed) == [index for index, size in enumerate(sizes) if size > 0]
    total_buckets = sum(not is_alone for is_alone, _, _ in units)
    for is_alone, num_elements, members in units:
        end = 0
        for parameter, begin in members:
            assert begin == end
            end += sizes[parameter]
        assert end == num_elements
        assert is_alone == (sizes[members[0][0]] * FLOAT_NBYTES >= alone)
        if is_alone:
            assert len(members) == 1
        else:  # without its last member the bucket was still open
            cap = caps[min(num_buckets, len(caps) - 1)]
            assert (num_elements - sizes[members[-1][0]]) * FLOAT_NBYTES < cap
            num_buckets += 1
            assert num_elements * FLOAT_NBYTES >= cap or num_buckets == total_buckets


@given(sizes_and_order)
def test_members_follow_the_given_order(given_sizes: tuple[list[int], list[int]]) -> None:
    """Within a bucket parameters lie as they are expected to become ready."""
    sizes, order = given_sizes
    position = {parameter: index for index, parameter in enumerate(order)}
    for _, _, members in testing.layout(sizes, order, 4000, [9000]):
        places = [position[parameter] for parameter, _ in members]
        assert places == sorted(places)


bits = st.integers(1, 300).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.integers(0, size - 1)),
        st.lists(st.integers(0, size - 1)),
    )
)


@given(bits)
def test_bitmaps_are_sets(case: tuple[int, list[int], list[int]]) -> None:
    """What ranks exchange about parameters loses none and invents none."""
    size, first, second = case
    assert testing.bitmap_union(size, first, second) == sorted(set(first) | set(second))


class BlockAllocatorMachine(RuleBasedStateMachine):
    """Compares the allocator with the obvious model: disjoint ranges, freed when unpinned."""

    BEGIN, END = 4096, 4096 + 64 * 200

    def __init__(self) -> None:
        super().__init__()
        self.allocator = testing.BlockAllocator(self.BEGIN, self.END)
        self.live: dict[int, int] = {}  # offset -> rounded nbytes
        self.pins: dict[int, int] = {}
        self.freed: set[int] = set()  # given back while pinned

    @rule(nbytes=st.integers(0, 64 * 220))
    def allocate(self, nbytes: int) -> None:
        rounded = max(ALIGNMENT, (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            assert rounded > self.largest_gap()
            return
        assert offset % ALIGNMENT == 0
        assert offset not in self.live
        self.live[offset] = rounded

    @precondition(lambda self: set(self.live) - self.freed)
    @rule(data=st.data())
    def deallocate(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(set(self.live) - self.freed)))
        self.allocator.deallocate(offset)
        self.freed.add(offset)
        self.reap(offset)

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.allocator.pin(offset)
        self.pins[offset] = self.pins.get(offset, 0) + 1

    @precondition(lambda self: bool(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.pins)))
        self.allocator.unpin(offset)
        self.pins[offset] -= 1
        if self.pins[offset] == 0:
            del self.pins[offset]
        self.reap(offset)

    def reap(self, offset: int) -> None:
        if offset in self.freed and offset not in self.pins:
            self.freed.remove(offset)
            del self.live[offset]

    def largest_gap(self) -> int:
        edges = [self.BEGIN]
        for offset in sorted(self.live):
            edges += [offset, offset + self.live[offset]]
        edges.append(self.END)
        return max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))

    @invariant()
    def blocks_are_disjoint_and_counted(self) -> None:
        end = self.BEGIN
        for offset in sorted(self.live):
            assert offset >= end
            assert self.allocator.is_block(offset)
            end = offset + self.live[offset]
        assert end <= self.allocator.high_water <= self.END
        assert self.allocator.used_nbytes == sum(self.live.values())


BlockAllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlockAllocator = BlockAllocatorMachine.TestCase
