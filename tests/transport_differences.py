"""Owns what transports of DataParallel may do differently; all else is tested alike."""

# Only shared memory has an arena for gradients to be born in; elsewhere all of them are packed.
HAS_ARENA = {"shared_memory": True, "hosts": True, "process_group": False, "nccl": False}

# Units are reduced one by one in shared memory; elsewhere by calls that all ranks make.
MOVES_ONLY_WHAT_IS_USED = {
    "shared_memory": True,
    "hosts": False,
    "process_group": False,
    "nccl": False,
}

# Shared memory adds in rank order whatever the bucket, so that 3 ranks get equal bits under any
# bucket_cap_mb. A process group splits a bucket as it likes; two addends have no order.
# Over hosts an element's bits depend on its values alone, too.
BITS_INDEPENDENT_OF_BUCKETS = {
    "shared_memory": (2, 3),
    "hosts": (2, 3),
    "process_group": (2,),
    "nccl": (2,),
}

# A rank that was killed cannot say so: shared memory knows whom it has lost, a process group only
# that a connection broke. A rank that raised is named by both.
NAMES_DEAD_RANK = {"shared_memory": True, "hosts": True, "process_group": False, "nccl": True}

# set_flush_denormal on one rank alone: shared memory reduces under its own floating-point settings,
# a process group under those of whichever rank adds a piece up.
CONTROLS_ROUNDING = {
    "shared_memory": True,
    "hosts": True,
    "process_group": False,
    "nccl": False,
}
