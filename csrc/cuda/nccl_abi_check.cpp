// Fails to compile where transport/nccl_api.h declares anything of NCCL otherwise than nccl.h does.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "transport/nccl_api.h"

namespace pydist::nccl {

namespace {

// What our declarations call a type of NCCL's or CUDA's.
template <class Theirs>
struct Ours {
  using Type = Theirs;
};
template <class Theirs>
struct Ours<Theirs*> {
  using Type = typename Ours<Theirs>::Type*;
};
template <class Result, class... Arguments>
struct Ours<Result (*)(Arguments...)> {
  using Type = typename Ours<Result>::Type (*)(typename Ours<Arguments>::Type...);
};
template <>
struct Ours<ncclComm_t> {
  using Type = Comm;
};
template <>
struct Ours<ncclUniqueId> {
  using Type = UniqueId;
};
template <>
struct Ours<ncclResult_t> {
  using Type = Result;
};
template <>
struct Ours<ncclDataType_t> {
  using Type = DataType;
};
template <>
struct Ours<ncclRedOp_t> {
  using Type = RedOp;
};
template <>
struct Ours<ncclScalarResidence_t> {
  using Type = ScalarResidence;
};
template <>
struct Ours<ncclConfig_t> {
  using Type = Config;
};
template <>
struct Ours<cudaStream_t> {
  using Type = Stream;
};

template <class Theirs, class Declared>
constexpr bool kSame = std::is_same_v<typename Ours<Theirs*>::Type, Declared>;

static_assert(NCCL_VERSION_CODE >= kOldestVersion, "of an older NCCL than any that is supported");

static_assert(kSame<decltype(ncclGetVersion), decltype(Api::get_version)>);
static_assert(kSame<decltype(ncclGetUniqueId), decltype(Api::get_unique_id)>);
static_assert(kSame<decltype(ncclCommInitRankConfig), decltype(Api::comm_init_rank_config)>);
static_assert(kSame<decltype(ncclCommFinalize), decltype(Api::comm_finalize)>);
static_assert(kSame<decltype(ncclCommDestroy), decltype(Api::comm_destroy)>);
static_assert(kSame<decltype(ncclCommAbort), decltype(Api::comm_abort)>);
static_assert(kSame<decltype(ncclCommGetAsyncError), decltype(Api::comm_get_async_error)>);
static_assert(kSame<decltype(ncclGetErrorString), decltype(Api::get_error_string)>);
static_assert(kSame<decltype(ncclGetLastError), decltype(Api::get_last_error)>);
static_assert(kSame<decltype(ncclRedOpCreatePreMulSum), decltype(Api::red_op_create_pre_mul_sum)>);
static_assert(kSame<decltype(ncclRedOpDestroy), decltype(Api::red_op_destroy)>);
static_assert(kSame<decltype(ncclAllReduce), decltype(Api::all_reduce)>);
static_assert(kSame<decltype(ncclReduceScatter), decltype(Api::reduce_scatter)>);
static_assert(kSame<decltype(ncclAllGather), decltype(Api::all_gather)>);
static_assert(kSame<decltype(ncclBroadcast), decltype(Api::broadcast)>);
static_assert(kSame<decltype(ncclSend), decltype(Api::send)>);
static_assert(kSame<decltype(ncclRecv), decltype(Api::recv)>);
static_assert(kSame<decltype(ncclGroupStart), decltype(Api::group_start)>);
static_assert(kSame<decltype(ncclGroupEnd), decltype(Api::group_end)>);
#if NCCL_VERSION_CODE >= 21900
static_assert(kSame<decltype(ncclMemAlloc), decltype(Api::mem_alloc)>);
static_assert(kSame<decltype(ncclMemFree), decltype(Api::mem_free)>);
#endif
#if NCCL_VERSION_CODE >= 22700
template <>
struct Ours<ncclWindow_t> {
  using Type = Window;
};
static_assert(kSame<decltype(ncclCommWindowRegister), decltype(Api::comm_window_register)>);
static_assert(kSame<decltype(ncclCommWindowDeregister), decltype(Api::comm_window_deregister)>);
static_assert(kWindowCollSymmetric == NCCL_WIN_COLL_SYMMETRIC);
#endif

// By value, so they travel alike if they are of one size and alignment.
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == 1);
static_assert(alignof(ncclUniqueId) == 1 && sizeof(UniqueId::bytes) == NCCL_UNIQUE_ID_BYTES);
static_assert(sizeof(Result) == sizeof(ncclResult_t));
static_assert(sizeof(DataType) == sizeof(ncclDataType_t));
static_assert(sizeof(RedOp) == sizeof(ncclRedOp_t));
static_assert(sizeof(ScalarResidence) == sizeof(ncclScalarResidence_t));

static_assert(kSuccess == int{ncclSuccess});
static_assert(kUnhandledCudaError == int{ncclUnhandledCudaError});
static_assert(kSystemError == int{ncclSystemError});
static_assert(kInternalError == int{ncclInternalError});
static_assert(kInvalidArgument == int{ncclInvalidArgument});
static_assert(kInvalidUsage == int{ncclInvalidUsage});
static_assert(kRemoteError == int{ncclRemoteError});
static_assert(kInProgress == int{ncclInProgress});

static_assert(kInt8 == int{ncclInt8} && kUint8 == int{ncclUint8});
static_assert(kInt32 == int{ncclInt32} && kUint32 == int{ncclUint32});
static_assert(kInt64 == int{ncclInt64} && kUint64 == int{ncclUint64});
static_assert(kFloat16 == int{ncclFloat16} && kFloat32 == int{ncclFloat32});
static_assert(kFloat64 == int{ncclFloat64} && kBfloat16 == int{ncclBfloat16});

static_assert(kSum == int{ncclSum} && kProd == int{ncclProd} && kMax == int{ncclMax});
static_assert(kMin == int{ncclMin} && kAvg == int{ncclAvg});
static_assert(kScalarDevice == int{ncclScalarDevice});
static_assert(kScalarHostImmediate == int{ncclScalarHostImmediate});

// A prefix: NCCL reads as much as `size` says.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
static_assert(alignof(Config) == alignof(ncclConfig_t));
static_assert(Config::kUndefined == NCCL_CONFIG_UNDEF_INT);
static_assert(Config{}.magic == ncclConfig_t(NCCL_CONFIG_INITIALIZER).magic);
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(std::is_same_v<decltype(Config::net_name), decltype(ncclConfig_t::netName)>);

}  // namespace

}  // namespace pydist::nccl
