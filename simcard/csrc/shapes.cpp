// What an operator is, and the shapes it gives: from Meta kernels, remembered.
#include "launch.h"

#include <ATen/EmptyTensor.h>

#include <cstring>
#include <shared_mutex>

namespace sim {
namespace {

// The host must wait for these on any card.
const std::set<std::string> kReadsData = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal",
    "aten::repeat_interleave", "aten::is_set_to", "aten::_linalg_check_errors"};
const std::set<std::string> kMovesRows = {
    "aten::index", "aten::index_select", "aten::gather", "aten::take", "aten::embedding", "aten::index_copy",
    "aten::index_copy_", "aten::_index_put_impl_", "aten::index_put_", "aten::index_add", "aten::index_add_",
    "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::index_fill_",
    "aten::put_", "aten::scatter_reduce", "aten::scatter_reduce_"};
const std::set<std::string> kShapeFromScalars = {"aten::arange", "aten::range", "aten::linspace", "aten::logspace"};
const std::map<std::string, Operator::Flops> kFlops = {
    {"aten::mm", Operator::Flops::mm},
    {"aten::addmm", Operator::Flops::addmm},
    {"aten::_addmm_activation", Operator::Flops::addmm},
    {"aten::bmm", Operator::Flops::bmm},
    {"aten::baddbmm", Operator::Flops::baddbmm},
    {"aten::convolution", Operator::Flops::convolution},
    {"aten::convolution_backward", Operator::Flops::convolution_backward}};

bool is_tensor_like(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

int argument_with_alias(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info && info->beforeSets() == alias.beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

Operator::Operator(const c10::OperatorHandle& of) : handle(of) {
  const auto& schema = handle.schema();
  name = schema.name();
  arguments = schema.arguments().size();
  returns = schema.returns().size();
  for (const auto& value : schema.returns()) {
    const auto* alias = value.alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "sim: the view operator ", name, " is not supported");
    int index = alias ? argument_with_alias(schema, *alias) : -1;
    alias_of.push_back(index);
    if (index < 0) creates = true;
    if (index < 0 && !is_tensor_like(value.type())) reads_data = true;
  }
  for (size_t i = 0; i < arguments; i++) {
    const auto& argument = schema.arguments()[i];
    bool out = argument.is_out();
    is_out.push_back(out);
    resizes |= out;
    const auto* alias = argument.alias_info();
    rewrites.push_back(alias && alias->isWrite() && !out && name != "aten::fill_" && name != "aten::zero_");
    if (argument.type()->str().find("Generator") != std::string::npos) generator = static_cast<int>(i);
  }
  reads_data |= kReadsData.count(name) > 0;
  moves_rows = kMovesRows.count(name) > 0;
  host_index = name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_";
  shape_from_scalars = kShapeFromScalars.count(name) > 0 || name.find("upsample") != std::string::npos;
  auto found = kFlops.find(name);
  if (found != kFlops.end()) flops = found->second;
}

namespace {

// Never destroyed: queued work refers to it.
const Operator* shared_operator(const c10::OperatorHandle& handle) {
  static std::mutex mutex;
  static auto* operators = new std::unordered_map<const void*, const Operator*>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& op = (*operators)[&handle.schema()];
  if (!op) op = new Operator(handle);
  return op;
}

}  // namespace

const Operator& operator_of(const c10::OperatorHandle& handle) {
  thread_local std::unordered_map<const void*, const Operator*> known;
  auto& op = known[&handle.schema()];
  if (!op) op = shared_operator(handle);
  return *op;
}

namespace {

using Key = std::vector<int64_t>;

int64_t bits(double value) {
  int64_t result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

void put(Key& key, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto sizes = impl->sizes();
  key.push_back(static_cast<int64_t>(tensor.scalar_type()) | (static_cast<int64_t>(sizes.size()) << 8) |
                (static_cast<int64_t>(impl->is_wrapped_number()) << 16) | (static_cast<int64_t>(tensor.device().type()) << 20));
  key.insert(key.end(), sizes.begin(), sizes.end());
  auto strides = impl->strides();
  key.insert(key.end(), strides.begin(), strides.end());
}

void put(Key& key, const c10::IValue& value, bool scalars) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) put(key, value.toTensor());
    else key.push_back(-1);
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool());
  } else if (value.isNone()) {
    key.push_back(-2);
  } else if (value.isDouble()) {
    key.push_back(scalars ? bits(value.toDouble()) : -3);
  } else if (value.isIntList()) {
    auto list = value.toIntVector();
    key.push_back(static_cast<int64_t>(list.size()));
    key.insert(key.end(), list.begin(), list.end());
  } else if (value.isString()) {
    key.push_back(static_cast<int64_t>(std::hash<std::string>()(value.toStringRef())));
  } else if (value.isList()) {
    auto list = value.toListRef();
    key.push_back(static_cast<int64_t>(list.size()));
    for (const auto& item : list) put(key, item, scalars);
  } else {
    key.push_back(-4);
  }
}

uint64_t hash(const Key& key) {
  uint64_t h = 0x9E3779B97F4A7C15ull;
  for (int64_t word : key) {
    h = (h ^ static_cast<uint64_t>(word)) * 0xD6E8FEB86659FD93ull;
    h ^= h >> 32;
  }
  return h;
}

at::Tensor meta(const at::Tensor& tensor) {
  if (tensor.device().type() != kSim && tensor.dim() == 0) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {.defined = false};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Runs the Meta kernel; false where there is none or where it needs data.
bool run_meta(const Operator& op, Arguments& stack) {
  c10::impl::ForceDispatchKeyGuard plain(plain_keys());
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard no_warnings(&silent);
  try {
    op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return true;
  } catch (const c10::NotImplementedError&) {
    return false;
  }
}

double matrix_flops(const Operator& op, const std::vector<at::Tensor>& t) {
  using F = Operator::Flops;
  auto product = [](const at::Tensor& a, const at::Tensor& b) {
    return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
  };
  switch (op.flops) {
    case F::mm:
    case F::bmm:
      return product(t[0], t[1]);
    case F::addmm:
    case F::baddbmm:
      return product(t[1], t[2]);
    default:
      return 0;
  }
}

double convolution_flops(const Operator& op, const Arguments& arguments, const Outcome& outcome) {
  auto multiply = [](const at::Tensor& weight, double positions) {
    return 2.0 * static_cast<double>(weight.numel()) * positions;
  };
  auto positions = [](c10::IntArrayRef output) {  // all but the channels
    double count = 1;
    for (size_t i = 0; i < output.size(); i++)
      if (i != 1) count *= static_cast<double>(output[i]);
    return count;
  };
  if (op.flops == Operator::Flops::convolution) {
    bool transposed = arguments[6].toBool();
    auto over = transposed ? arguments[0].toTensor().sizes() : c10::IntArrayRef(outcome.created[0].shapes[0].sizes);
    return multiply(arguments[1].toTensor(), positions(over));
  }
  bool transposed = arguments[7].toBool();
  auto mask = arguments[10].toBoolList();
  double one = multiply(arguments[2].toTensor(), positions(arguments[transposed ? 1 : 0].toTensor().sizes()));
  return one * (mask[0] + mask[1]);
}

double flops_of(const Operator& op, const Arguments& arguments, const Outcome& outcome) {
  using F = Operator::Flops;
  if (op.flops == F::none) return 0;
  if (op.flops == F::convolution || op.flops == F::convolution_backward)
    return convolution_flops(op, arguments, outcome);
  std::vector<at::Tensor> tensors;
  for (const auto& value : arguments) each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return matrix_flops(op, tensors);
}

Outcome infer(const Operator& op, const Arguments& arguments) {
  Outcome outcome;
  Arguments stack(arguments);
  for (auto& value : stack) {
    replace_tensors(value, meta);
    if (value.isDevice()) value = c10::Device(c10::kMeta);
    if (value.isGenerator()) value = c10::IValue();
  }
  Arguments before(stack);
  outcome.known = run_meta(op, stack);
  if (!outcome.known) return outcome;
  for (size_t i = 0; i < op.returns; i++) {
    if (op.alias_of[i] >= 0) continue;
    Outcome::Return value{stack[i].isTensorList(), {}};
    if (value.list)
      for (const at::Tensor& tensor : stack[i].toTensorVector()) value.shapes.push_back(shape_of(tensor));
    else value.shapes.push_back(shape_of(stack[i].toTensor()));
    outcome.created.push_back(std::move(value));
  }
  for (size_t i = 0; i < op.arguments; i++)
    if (op.is_out[i] && before[i].isTensor()) outcome.resized.emplace_back(i, shape_of(before[i].toTensor()));
  outcome.flops = flops_of(op, arguments, outcome);
  for (const auto& value : arguments)
    each_tensor(value, [&](const at::Tensor& tensor) { if (tensor.dim() > 0) outcome.dtype = tensor.scalar_type(); });
  return outcome;
}

struct Memory {
  std::shared_mutex mutex;
  std::unordered_multimap<uint64_t, std::unique_ptr<Outcome>> outcomes;

  const Outcome* find(uint64_t h, const Key& key) {
    std::shared_lock<std::shared_mutex> lock(mutex);
    auto [first, last] = outcomes.equal_range(h);
    for (; first != last; ++first)
      if (first->second->key == key) return first->second.get();
    return nullptr;
  }
};

Memory& remembered() {
  static auto* memory = new Memory;
  return *memory;
}

}  // namespace

const Outcome& outcome_of(const Operator& op, const Arguments& arguments) {
  thread_local Key key;
  key.clear();
  key.push_back(reinterpret_cast<int64_t>(&op.handle.schema()));
  for (const auto& value : arguments) put(key, value, op.shape_from_scalars);
  uint64_t h = hash(key);
  if (const Outcome* outcome = remembered().find(h, key)) return *outcome;
  Key own = key;  // a Meta kernel may launch, and use the thread's key
  auto outcome = std::make_unique<Outcome>(infer(op, arguments));
  outcome->key = std::move(own);
  std::unique_lock<std::shared_mutex> lock(remembered().mutex);
  return *remembered().outcomes.emplace(h, std::move(outcome))->second;
}

}  // namespace sim
