// Registers the ops with TensorFlow: attributes, types and shapes.
#include <initializer_list>
#include <memory>

#include "kernels.h"

namespace polyhvd::tf {
namespace {

struct DeleteShape {
  void operator()(TF_ShapeHandle* shape) const noexcept { tf.TF_DeleteShapeHandle(shape); }
};
using ShapePtr = std::unique_ptr<TF_ShapeHandle, DeleteShape>;

constexpr std::size_t kUnknownDimension = static_cast<std::size_t>(-1);

#define POLYHVD_TYPES                                                                        \
  "{float, double, half, bfloat16, uint8, int8, int16, int32, int64, bool, uint16, uint32, " \
  "uint64}"

// How many of the inputs are tensors, each with an output. The last one may be a generation: the
// type of that shows whether there is one, as a shape function sees no attributes but types.
int count_tensors(TF_ShapeInferenceContext* context, TF_Status* status) {
  int type = kBool;
  tf.TF_ShapeInferenceContext_GetAttrType(context, "Tgeneration", &type, status);
  const auto count = static_cast<int>(tf.TF_ShapeInferenceContextNumInputs(context));
  return type == kInt64 ? count - 1 : count;
}

void infer_same(TF_ShapeInferenceContext* context, TF_Status* status) {
  const ShapePtr shape(tf.TF_NewShapeHandle());
  const int count = count_tensors(context, status);
  for (int i = 0; i < count; ++i) {
    tf.TF_ShapeInferenceContextGetInput(context, i, shape.get(), status);
    tf.TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

// Like the input but for the first dimension, which is known when ranks have agreed.
void infer_other_rows(TF_ShapeInferenceContext* context, int index, TF_Status* status) {
  const ShapePtr shape(tf.TF_NewShapeHandle());
  tf.TF_ShapeInferenceContextGetInput(context, index, shape.get(), status);
  if (!tf.TF_ShapeInferenceContextRankKnown(context, shape.get())) {
    tf.TF_ShapeInferenceContextSetOutput(context, index, shape.get(), status);
    return;
  }
  const std::int64_t rank = tf.TF_ShapeInferenceContextRank(context, shape.get());
  if (rank < 1) {
    tf.TF_SetStatus(status, kInvalidArgument, "a scalar has no first dimension; reshape it to [1]");
    return;
  }
  const ShapePtr rest(tf.TF_NewShapeHandle());
  const ShapePtr result(tf.TF_NewShapeHandle());
  const ShapePtr rows(tf.TF_ShapeInferenceContextVectorFromSize(context, kUnknownDimension));
  tf.TF_ShapeInferenceContextSubshape(context, shape.get(), 1, rank, rest.get(), status);
  tf.TF_ShapeInferenceContextConcatenateShapes(context, rows.get(), rest.get(), result.get(),
                                               status);
  tf.TF_ShapeInferenceContextSetOutput(context, index, result.get(), status);
}

void infer_all_other_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int count = count_tensors(context, status);
  for (int i = 0; i < count && tf.TF_GetCode(status) == kOk; ++i) {
    infer_other_rows(context, i, status);
  }
}

void infer_exchanged(TF_ShapeInferenceContext* context, TF_Status* status) {
  infer_other_rows(context, 0, status);
  if (tf.TF_GetCode(status) != kOk) return;
  const ShapePtr received(tf.TF_ShapeInferenceContextVectorFromSize(context, kUnknownDimension));
  tf.TF_ShapeInferenceContextSetOutput(context, 1, received.get(), status);
}

void infer_number(TF_ShapeInferenceContext* context, TF_Status* status) {
  const ShapePtr scalar(tf.TF_ShapeInferenceContextScalar(context));
  tf.TF_ShapeInferenceContextSetOutput(context, 0, scalar.get(), status);
}

void infer_nothing(TF_ShapeInferenceContext*, TF_Status*) {}

using Specs = std::initializer_list<const char*>;

struct OpSpec {
  const char* name;
  OpKind kind;
  InferShape infer;
  Specs attributes;
  Specs inputs;
  Specs outputs;
};

bool define(const OpSpec& spec) {
  const Status status;
  TF_OpDefinitionBuilder* op = tf.TF_NewOpDefinitionBuilder(spec.name);
  for (const char* attribute : spec.attributes) tf.TF_OpDefinitionBuilderAddAttr(op, attribute);
  for (const char* attribute :
       {"tensor_name: string", "where: string = ''", "process_set: int = 0", "priority: int = 0",
        "G: int >= 0 = 0", "Tgeneration: {bool, int64} = DT_BOOL"}) {
    tf.TF_OpDefinitionBuilderAddAttr(op, attribute);
  }
  for (const char* input : spec.inputs) tf.TF_OpDefinitionBuilderAddInput(op, input);
  // None, or one of int64: what PolyhvdGeneration returned when the call began.
  tf.TF_OpDefinitionBuilderAddInput(op, "generation: G * Tgeneration");
  for (const char* output : spec.outputs) tf.TF_OpDefinitionBuilderAddOutput(op, output);
  // Neither merged with its like nor computed when the graph is optimised.
  tf.TF_OpDefinitionBuilderSetIsStateful(op, true);
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, spec.infer);
  tf.TF_RegisterOpDefinition(op, status);
  if (!status.ok()) return false;
  TF_KernelBuilder* kernel = tf.TF_NewAsyncKernelBuilder(
      spec.name, "CPU", create_function(spec.kind), &compute, &delete_kernel);
  tf.TF_RegisterKernelBuilder(spec.name, kernel, status);
  return status.ok();
}

bool define_generation() {
  static constexpr const char* kName = "PolyhvdGeneration";
  const Status status;
  TF_OpDefinitionBuilder* op = tf.TF_NewOpDefinitionBuilder(kName);
  tf.TF_OpDefinitionBuilderAddOutput(op, "generation: int64");
  tf.TF_OpDefinitionBuilderSetIsStateful(op, true);  // not the same in every call
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, &infer_number);
  tf.TF_RegisterOpDefinition(op, status);
  if (!status.ok()) return false;
  TF_KernelBuilder* kernel =
      tf.TF_NewKernelBuilder(kName, "CPU", nullptr, &compute_generation, nullptr);
  tf.TF_RegisterKernelBuilder(kName, kernel, status);
  return status.ok();
}

}  // namespace

// The scales are doubles, which attributes cannot be: their bits travel as integers.
// A list may have tensors of several types.
const char* register_ops() {
  static constexpr const char* kTensors = "T: list(" POLYHVD_TYPES ") >= 1";
  // 1 or 0 for derivatives.py, if the call has the argument.
  static constexpr const char* kExactGradient = "exact_gradient: int = -1";
  const OpSpec specs[] = {
      {"PolyhvdAllreduce",
       OpKind::kAllreduce,
       &infer_same,
       {kTensors, "reduce_op: int", "prescale_bits: int", "postscale_bits: int"},
       {"tensors: T"},
       {"outputs: T"}},
      {"PolyhvdReducescatter",
       OpKind::kReducescatter,
       &infer_all_other_rows,
       {kTensors, "reduce_op: int", "prescale_bits: int", "postscale_bits: int", kExactGradient},
       {"tensors: T"},
       {"outputs: T"}},
      {"PolyhvdAllgather",
       OpKind::kAllgather,
       &infer_all_other_rows,
       {kTensors, kExactGradient},
       {"tensors: T"},
       {"outputs: T"}},
      {"PolyhvdBroadcast",
       OpKind::kBroadcast,
       &infer_same,
       {kTensors, "root_rank: int", kExactGradient},
       {"tensors: T"},
       {"outputs: T"}},
      {"PolyhvdAlltoall",
       OpKind::kAlltoall,
       &infer_exchanged,
       {"T: " POLYHVD_TYPES, "Tsplits: {int32, int64}", "has_splits: int"},
       {"tensor: T", "splits: Tsplits"},
       {"output: T", "received_splits: int32"}},
      {"PolyhvdBarrier", OpKind::kBarrier, &infer_nothing, {}, {}, {}},
      {"PolyhvdJoin", OpKind::kJoin, &infer_number, {}, {}, {"last_rank: int32"}},
  };
  for (const OpSpec& spec : specs) {
    if (!define(spec)) return spec.name;
  }
  if (!define_generation()) return "PolyhvdGeneration";
  return nullptr;
}

}  // namespace polyhvd::tf
