// Finds NCCL's library and its functions.
#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <vector>

#include "base/check.h"
#include "transport/nccl_api.h"

namespace pydist::nccl {

namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr int kMemoryVersion = 21900;  // ncclMemAlloc
constexpr int kWindowVersion = 22700;  // ncclCommWindowRegister

std::mutex mutex;
std::string only_path;               // guarded by mutex; see use_library()
std::unique_ptr<const Api> the_api;  // guarded by mutex until made, then constant

struct Library {
  void* handle;
  std::string path;
};

std::string last_error() {
  const char* text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

Library open_library(const std::string& path) {
  if (!only_path.empty()) {
    void* handle = ::dlopen(only_path.c_str(), RTLD_NOW | RTLD_LOCAL);
    PYDIST_CHECK(handle != nullptr, UsageError, "cannot open ", only_path, ": ", last_error());
    return {handle, only_path};
  }
  if (void* handle = ::dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return {handle, kSoname};
  std::string tried = concat(kSoname, " among the loaded libraries");
  std::vector<std::string> candidates;
  if (!path.empty()) candidates.push_back(path);
  candidates.push_back(kSoname);
  for (const std::string& candidate : candidates) {
    if (void* handle = ::dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return {handle, candidate};
    }
    tried += concat("; ", candidate, " (", last_error(), ")");
  }
  throw UsageError(concat("NCCL was not found. Looked for ", tried,
                          ". It comes with torch for CUDA, in the package nvidia-nccl-cu12 or "
                          "nvidia-nccl-cu13; install the one of torch's CUDA version."));
}

// Where the library really lies, for messages.
std::string file_of(const Library& library, void* function) {
  Dl_info info{};
  const bool known = ::dladdr(function, &info) != 0 && info.dli_fname != nullptr;
  return known ? info.dli_fname : library.path;
}

class Loader {
 public:
  explicit Loader(Library library) : library_(std::move(library)) {}

  template <class Function>
  void find(Function& function, const char* name) {
    find_if_any(function, name);
    if (function == nullptr) missing_ += concat(missing_.empty() ? "" : ", ", name);
  }

  template <class Function>
  void find_if_any(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library_.handle, name));
  }

  const Library& library() const { return library_; }
  const std::string& missing() const { return missing_; }

 private:
  Library library_;
  std::string missing_;
};

std::string version_text(int version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

void find_version(Loader& loader, Api& api) {
  loader.find(api.get_version, "ncclGetVersion");
  PYDIST_CHECK(api.get_version != nullptr, UsageError, loader.library().path,
               " is no NCCL: it has no function ncclGetVersion");
  api.path = file_of(loader.library(), reinterpret_cast<void*>(api.get_version));
  const Result result = api.get_version(&api.version);
  PYDIST_CHECK(result == kSuccess, UsageError, "ncclGetVersion of ", api.path, " failed with ",
               static_cast<int>(result));
  PYDIST_CHECK(api.version >= kOldestVersion, UsageError, "NCCL 2.18 or newer is needed, and ",
               api.path, " is ", version_text(api.version),
               ". Use a torch that was built with a newer one.");
}

void find_functions(Loader& loader, Api& api) {
  loader.find(api.get_unique_id, "ncclGetUniqueId");
  loader.find(api.comm_init_rank_config, "ncclCommInitRankConfig");
  loader.find(api.comm_finalize, "ncclCommFinalize");
  loader.find(api.comm_destroy, "ncclCommDestroy");
  loader.find(api.comm_abort, "ncclCommAbort");
  loader.find(api.comm_get_async_error, "ncclCommGetAsyncError");
  loader.find(api.get_error_string, "ncclGetErrorString");
  loader.find(api.get_last_error, "ncclGetLastError");
  loader.find(api.red_op_create_pre_mul_sum, "ncclRedOpCreatePreMulSum");
  loader.find(api.red_op_destroy, "ncclRedOpDestroy");
  loader.find(api.all_reduce, "ncclAllReduce");
  loader.find(api.reduce_scatter, "ncclReduceScatter");
  loader.find(api.all_gather, "ncclAllGather");
  loader.find(api.broadcast, "ncclBroadcast");
  loader.find(api.send, "ncclSend");
  loader.find(api.recv, "ncclRecv");
  loader.find(api.group_start, "ncclGroupStart");
  loader.find(api.group_end, "ncclGroupEnd");
  PYDIST_CHECK(loader.missing().empty(), UsageError, api.path, ", NCCL ", version_text(api.version),
               ", lacks ", loader.missing());
}

// By the version too: what an older one exports under these names may differ.
void find_optional_functions(Loader& loader, Api& api) {
  if (api.version >= kMemoryVersion) {
    loader.find_if_any(api.mem_alloc, "ncclMemAlloc");
    loader.find_if_any(api.mem_free, "ncclMemFree");
  }
  if (api.version >= kWindowVersion) {
    loader.find_if_any(api.comm_window_register, "ncclCommWindowRegister");
    loader.find_if_any(api.comm_window_deregister, "ncclCommWindowDeregister");
  }
}

std::unique_ptr<const Api> load(const std::string& path) {
  auto api = std::make_unique<Api>();
  Loader loader(open_library(path));
  find_version(loader, *api);
  find_functions(loader, *api);
  find_optional_functions(loader, *api);
  return api;
}

}  // namespace

const Api& api(const std::string& path) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!the_api) the_api = load(path);
  return *the_api;
}

void use_library(const std::string& path) {
  const std::lock_guard<std::mutex> lock(mutex);
  PYDIST_CHECK(!the_api, UsageError, "NCCL is in use already, from ", the_api->path);
  only_path = path;
}

}  // namespace pydist::nccl
