// The numbers of the C and the C++ interface are the same, so that a cast converts them.
#include "recsdk/c_api.h"
#include "recsdk/recsdk.h"

namespace recsdk {
namespace {

template <typename Enum>
constexpr bool same(Enum value, int number) {
  return static_cast<int>(value) == number;
}

static_assert(same(ErrorCode::kInvalidArgument, RECSDK_ERROR_INVALID_ARGUMENT));
static_assert(same(ErrorCode::kOutOfMemory, RECSDK_ERROR_OUT_OF_MEMORY));
static_assert(same(ErrorCode::kCapacity, RECSDK_ERROR_CAPACITY));
static_assert(same(ErrorCode::kBusy, RECSDK_ERROR_BUSY));
static_assert(same(ErrorCode::kNonFinite, RECSDK_ERROR_NON_FINITE));
static_assert(same(ErrorCode::kBackendUnavailable, RECSDK_ERROR_BACKEND_UNAVAILABLE));
static_assert(same(ErrorCode::kInternal, RECSDK_ERROR_INTERNAL));
static_assert(same(ErrorCode::kCheckpoint, RECSDK_ERROR_CHECKPOINT));

static_assert(same(Outcome::kFound, RECSDK_OUTCOME_FOUND));
static_assert(same(Outcome::kInserted, RECSDK_OUTCOME_INSERTED));
static_assert(same(Outcome::kRefused, RECSDK_OUTCOME_REFUSED));
static_assert(same(Outcome::kMissing, RECSDK_OUTCOME_MISSING));
static_assert(same(Outcome::kOverflowed, RECSDK_OUTCOME_OVERFLOWED));
static_assert(same(Outcome::kNotAdmitted, RECSDK_OUTCOME_NOT_ADMITTED));
static_assert(kNumOutcomes == RECSDK_NUM_OUTCOMES);

static_assert(same(AdmitTerm::Kind::kCount, RECSDK_ADMIT_COUNT));
static_assert(same(AdmitTerm::Kind::kProbability, RECSDK_ADMIT_PROBABILITY));
static_assert(same(AdmitTerm::Kind::kAll, RECSDK_ADMIT_ALL));
static_assert(same(AdmitTerm::Kind::kAny, RECSDK_ADMIT_ANY));
static_assert(same(AdmitTerm::Kind::kShowClick, RECSDK_ADMIT_SHOW_CLICK));
static_assert(same(AdmitTerm::Kind::kCountSketch, RECSDK_ADMIT_COUNT_SKETCH));
static_assert(same(AdmitTerm::Kind::kShowClickOfStep, RECSDK_ADMIT_SHOW_CLICK_OF_STEP));

static_assert(same(DefaultKind::kConstant, RECSDK_DEFAULT_CONSTANT));
static_assert(same(DefaultKind::kInitialRow, RECSDK_DEFAULT_INITIAL_ROW));
static_assert(same(DefaultKind::kSharedRows, RECSDK_DEFAULT_SHARED_ROWS));
static_assert(same(BeginWith::kInitialRow, RECSDK_BEGIN_WITH_INITIAL_ROW));
static_assert(same(BeginWith::kSharedRow, RECSDK_BEGIN_WITH_SHARED_ROW));

static_assert(same(Pooling::kSum, RECSDK_POOLING_SUM));
static_assert(same(Pooling::kMean, RECSDK_POOLING_MEAN));

static_assert(same(OptimizerKind::kSgd, RECSDK_OPTIMIZER_SGD));
static_assert(same(OptimizerKind::kAdagrad, RECSDK_OPTIMIZER_ADAGRAD));
static_assert(same(OptimizerKind::kRowwiseAdagrad, RECSDK_OPTIMIZER_ROWWISE_ADAGRAD));
static_assert(same(OptimizerKind::kAdam, RECSDK_OPTIMIZER_ADAM));
static_assert(same(OptimizerKind::kPartialRowwiseAdam, RECSDK_OPTIMIZER_PARTIAL_ROWWISE_ADAM));
static_assert(same(OptimizerKind::kLamb, RECSDK_OPTIMIZER_LAMB));
static_assert(same(OptimizerKind::kFtrl, RECSDK_OPTIMIZER_FTRL));
static_assert(same(OptimizerKind::kRmsprop, RECSDK_OPTIMIZER_RMSPROP));
static_assert(same(WeightDecay::kL2, RECSDK_WEIGHT_DECAY_L2));
static_assert(same(WeightDecay::kDecoupled, RECSDK_WEIGHT_DECAY_DECOUPLED));
static_assert(same(BiasCorrection::kTable, RECSDK_BIAS_CORRECTION_TABLE));
static_assert(same(BiasCorrection::kRow, RECSDK_BIAS_CORRECTION_ROW));

static_assert(same(InitializerKind::kConstant, RECSDK_INITIALIZER_CONSTANT));
static_assert(same(InitializerKind::kUniform, RECSDK_INITIALIZER_UNIFORM));
static_assert(same(InitializerKind::kNormal, RECSDK_INITIALIZER_NORMAL));
static_assert(same(InitializerKind::kTruncatedNormal, RECSDK_INITIALIZER_TRUNCATED_NORMAL));
static_assert(same(InitializerKind::kCustom, RECSDK_INITIALIZER_CUSTOM));

static_assert(same(Codec::kNone, RECSDK_CODEC_NONE));
static_assert(same(Codec::kZstd, RECSDK_CODEC_ZSTD));
static_assert(same(NonFinite::kApply, RECSDK_NONFINITE_APPLY));
static_assert(same(NonFinite::kRaise, RECSDK_NONFINITE_RAISE));
static_assert(same(NonFinite::kSkip, RECSDK_NONFINITE_SKIP));
static_assert(same(OnFull::kRefuse, RECSDK_ON_FULL_REFUSE));
static_assert(same(OnFull::kRaise, RECSDK_ON_FULL_RAISE));
static_assert(same(DType::kFloat32, RECSDK_DTYPE_FLOAT32));
static_assert(same(DType::kBFloat16, RECSDK_DTYPE_BFLOAT16));
static_assert(same(DType::kFloat16, RECSDK_DTYPE_FLOAT16));
static_assert(same(Rounding::kStochastic, RECSDK_ROUNDING_STOCHASTIC));
static_assert(same(Rounding::kNearest, RECSDK_ROUNDING_NEAREST));
static_assert(same(FieldPlace::kRecord, RECSDK_FIELD_RECORD));
static_assert(same(FieldPlace::kScalars, RECSDK_FIELD_SCALARS));

}  // namespace
}  // namespace recsdk
