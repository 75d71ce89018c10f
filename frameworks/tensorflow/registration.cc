// What TensorFlow is told of the ops: attributes, types and shapes.
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

// Reductions know these; the collectives that move bytes know all of their widths.
constexpr const char* kReducible =
    "T: {float, double, half, bfloat16, uint8, int8, int16, int32, int64, bool}";
constexpr const char* kMovable =
    "T: {float, double, half, bfloat16, uint8, int8, int16, int32, int64, bool, uint16, uint32, "
    "uint64}";

void infer_same(TF_ShapeInferenceContext* context, TF_Status* status) {
  const ShapePtr shape(tf.TF_NewShapeHandle());
  const auto count = static_cast<int>(tf.TF_ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < count; ++i) {
    tf.TF_ShapeInferenceContextGetInput(context, i, shape.get(), status);
    tf.TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

// Like the input but for the first dimension, which is known when ranks have agreed.
void infer_gathered(TF_ShapeInferenceContext* context, TF_Status* status) {
  const ShapePtr shape(tf.TF_NewShapeHandle());
  const ShapePtr rest(tf.TF_NewShapeHandle());
  const ShapePtr gathered(tf.TF_NewShapeHandle());
  const ShapePtr rows(tf.TF_ShapeInferenceContextVectorFromSize(context, kUnknownDimension));
  const auto count = static_cast<int>(tf.TF_ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < count; ++i) {
    tf.TF_ShapeInferenceContextGetInput(context, i, shape.get(), status);
    if (!tf.TF_ShapeInferenceContextRankKnown(context, shape.get())) {
      tf.TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
      continue;
    }
    const std::int64_t rank = tf.TF_ShapeInferenceContextRank(context, shape.get());
    if (rank < 1) {
      tf.TF_SetStatus(status, kInvalidArgument,
                      "allgather: a scalar has no first dimension to gather along; reshape it "
                      "to [1]");
      return;
    }
    tf.TF_ShapeInferenceContextSubshape(context, shape.get(), 1, rank, rest.get(), status);
    tf.TF_ShapeInferenceContextConcatenateShapes(context, rows.get(), rest.get(), gathered.get(),
                                                 status);
    tf.TF_ShapeInferenceContextSetOutput(context, i, gathered.get(), status);
  }
}

bool define(const char* name, OpKind kind, const char* types, InferShape infer,
            std::initializer_list<const char*> attributes) {
  Status status;
  TF_OpDefinitionBuilder* op = tf.TF_NewOpDefinitionBuilder(name);
  for (const char* attribute : {types, "N: int >= 1", "tensor_name: string", "where: string = ''",
                                "process_set: int = 0", "priority: int = 0"}) {
    tf.TF_OpDefinitionBuilderAddAttr(op, attribute);
  }
  for (const char* attribute : attributes) tf.TF_OpDefinitionBuilderAddAttr(op, attribute);
  tf.TF_OpDefinitionBuilderAddInput(op, "tensors: N * T");
  tf.TF_OpDefinitionBuilderAddOutput(op, "outputs: N * T");
  // Neither merged with its like nor computed when the graph is optimised.
  tf.TF_OpDefinitionBuilderSetIsStateful(op, true);
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, infer);
  tf.TF_RegisterOpDefinition(op, status);
  if (!status.ok()) return false;
  TF_KernelBuilder* kernel =
      tf.TF_NewAsyncKernelBuilder(name, "CPU", create_function(kind), &compute, &delete_kernel);
  tf.TF_RegisterKernelBuilder(name, kernel, status);
  return status.ok();
}

}  // namespace

// The scales are doubles, which attributes cannot be: their bits travel as integers.
const char* register_ops() {
  if (!define("PolyhvdAllreduce", OpKind::kAllreduce, kReducible, &infer_same,
              {"reduce_op: int", "prescale_bits: int", "postscale_bits: int"})) {
    return "room for an op PolyhvdAllreduce";
  }
  if (!define("PolyhvdAllgather", OpKind::kAllgather, kMovable, &infer_gathered, {})) {
    return "room for an op PolyhvdAllgather";
  }
  if (!define("PolyhvdBroadcast", OpKind::kBroadcast, kMovable, &infer_same, {"root_rank: int"})) {
    return "room for an op PolyhvdBroadcast";
  }
  return nullptr;
}

}  // namespace polyhvd::tf
