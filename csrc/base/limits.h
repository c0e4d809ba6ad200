// What containers and the system leave this process: memory and processor time.
#pragma once

#include <cstddef>

namespace pydist {

// Bytes that can be had now without the kernel killing somebody: what the system has available and
// what the memory cgroup leaves (its file cache counts as free). SIZE_MAX where nothing is known.
size_t available_memory();

// Cores that the cgroup's CPU bandwidth limit is worth; a large number where there is none.
double cgroup_cpus();

}  // namespace pydist
