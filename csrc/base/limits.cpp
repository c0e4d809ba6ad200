#include "base/limits.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace pydist {

namespace {

constexpr double kUnlimited = 1e9;

// Folders in which a controller's files of this process may lie, the most special first: its own
// cgroup, and the root that a container sees.
std::vector<std::string> cgroup_folders(const std::string& controller) {
  std::vector<std::string> folders;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (names == ",,") folders.push_back("/sys/fs/cgroup" + path);
    if (names.find("," + controller + ",") != std::string::npos) {
      folders.push_back("/sys/fs/cgroup/" + controller + path);
    }
  }
  folders.push_back("/sys/fs/cgroup");
  folders.push_back("/sys/fs/cgroup/" + controller);
  return folders;
}

std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // missing, or "max"
}

// The sum of the named lines of a "name value" file.
uint64_t sum_of_lines(const std::string& path, const std::vector<std::string>& names) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  uint64_t sum = 0;
  while (file >> name >> value) {
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  }
  return sum;
}

size_t system_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") return kib << 10;
  }
  return SIZE_MAX;
}

size_t left_in_cgroup(const std::string& folder) {
  auto limit = read_number(folder + "/memory.max");
  auto used = read_number(folder + "/memory.current");
  uint64_t cache = sum_of_lines(folder + "/memory.stat", {"inactive_file", "active_file"});
  if (!limit) {  // version 1
    limit = read_number(folder + "/memory.limit_in_bytes");
    used = read_number(folder + "/memory.usage_in_bytes");
    cache = sum_of_lines(folder + "/memory.stat", {"total_inactive_file", "total_active_file"});
  }
  if (!limit || !used) return SIZE_MAX;
  const uint64_t kept = *used > cache ? *used - cache : 0;
  return *limit > kept ? *limit - kept : 0;
}

}  // namespace

size_t available_memory() {
  size_t available = system_memory();
  for (const std::string& folder : cgroup_folders("memory")) {
    available = std::min(available, left_in_cgroup(folder));
  }
  return available;
}

double cgroup_cpus() {
  double cpus = kUnlimited;
  for (const std::string& folder : cgroup_folders("cpu")) {
    std::ifstream file(folder + "/cpu.max");
    double quota = 0;
    double period = 0;
    if (!(file >> quota >> period)) {  // version 1, or "max"; -1 there means no limit
      std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
      std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    if (quota > 0 && period > 0) cpus = std::min(cpus, quota / period);
  }
  return cpus;
}

}  // namespace pydist
