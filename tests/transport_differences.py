"""Owns what the two transports of DataParallel may do differently; all else is tested alike."""

# A rank whose peer raised or died raises within this many seconds. The process group learns of a
# peer that raises but lives on only through the Store, and of a lost connection from the system.
DETECTION_S = {"shared_memory": 5.0, "process_group": 10.0}

# Ctrl-C while a rank waits in backward raises KeyboardInterrupt within this many seconds.
INTERRUPT_S = {"shared_memory": 2.0, "process_group": 3.0}

# Only shared memory has an arena for gradients to be born in; elsewhere all of them are packed.
HAS_ARENA = {"shared_memory": True, "process_group": False}

# Shared memory adds in rank order whatever the bucket, so that 3 ranks get equal bits under any
# bucket_cap_mb. A process group splits a bucket as it likes; two addends have no order.
BITS_INDEPENDENT_OF_BUCKETS = {"shared_memory": (2, 3), "process_group": (2,)}

# fp16 and bf16 are added up in fp32 by shared memory, and in their own precision by Gloo.
ACCUMULATES_IN_FP32 = {"shared_memory": True, "process_group": False}
