// What the device computes: every op by the CPU's kernel for it, on the same memory, counted as one launch.
#include "device.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

namespace accelerator {
namespace {

using at::Tensor;

// Give the host a bool, or a result whose shape depends on values.
const std::set<std::string> NEEDS_VALUES = {
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive"};
// Take indices and masks from the host as well.
const std::set<std::string> TAKES_FROM_HOST = {"aten::index", "aten::_index_put_impl_"};

void let_go(void* storage) { delete static_cast<c10::Storage*>(storage); }

c10::Storage for_cpu(const c10::Storage& ours) {
  c10::DataPtr data(ours.mutable_data(), new c10::Storage(ours), &let_go, c10::kCPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), ours.nbytes(), std::move(data), at::getCPUAllocator(), true);
}

void move_into(c10::Storage& ours, const c10::Storage& from_cpu) {
  auto data = memory()->allocate(from_cpu.nbytes());
  memory()->copy_data(data.get(), from_cpu.data(), from_cpu.nbytes());
  ours.set_data_ptr_noswap(std::move(data));
  ours.set_nbytes(from_cpu.nbytes());
}

Tensor on_storage(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return Tensor(std::move(made));
}

// Tensors of the device as the CPU's kernels see them during one op, and what these return as the device's.
class Loan {
 public:
  Tensor to_cpu(const Tensor& ours) {
    if (!ours.defined() || ours.device().type() != TYPE) return ours;
    for (auto& each : tensors_)
      if (each.ours.is_same(ours)) return each.lent;
    device_ = ours.device();
    auto lent = on_storage(to_cpu(ours.storage()), ours, c10::DispatchKey::CPU);
    if (ours.unsafeGetTensorImpl()->is_wrapped_number()) lent.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.push_back({ours, lent});
    return lent;
  }

  c10::Storage to_cpu(const c10::Storage& ours) {
    for (auto& each : storages_)
      if (each.ours.is_alias_of(ours)) return each.lent;
    storages_.push_back({ours, for_cpu(ours)});
    return storages_.back().lent;
  }

  Tensor to_device(const Tensor& returned) {
    if (!returned.defined()) return returned;
    for (auto& each : tensors_)
      if (each.lent.is_same(returned)) return each.ours;
    return on_storage(to_device(returned.storage()), returned, c10::DispatchKey::PrivateUse1);
  }

  // Sizes and memory that an op has changed are changed here too.
  void settle() {
    for (auto& each : storages_) {
      if (each.lent.nbytes() != each.ours.nbytes()) move_into(each.ours, each.lent);
    }
    for (auto& [ours, lent] : tensors_) {
      auto* tensor = ours.unsafeGetTensorImpl();
      auto storage = to_device(lent.storage());
      if (!storage.is_alias_of(ours.storage())) tensor->set_storage_keep_dtype(storage);
      tensor->set_sizes_and_strides(lent.sizes(), lent.strides(), lent.storage_offset());
    }
  }

  c10::Device device() const { return device_.value_or(current_device()); }
  void on(c10::Device device) { device_ = device; }

 private:
  struct LentTensor { Tensor ours, lent; };
  struct LentStorage { c10::Storage ours, lent; };

  c10::Storage to_device(const c10::Storage& lent) {
    for (auto& each : storages_)
      if (each.lent.unsafeGetStorageImpl() == lent.unsafeGetStorageImpl()) return each.ours;
    c10::DeviceGuard guard(device());
    c10::Storage ours(c10::Storage::use_byte_size_t(), 0, memory(), /*resizable=*/true);
    move_into(ours, lent);
    storages_.push_back({ours, lent});
    return storages_.back().ours;
  }

  std::optional<c10::Device> device_;
  std::vector<LentTensor> tensors_;
  std::vector<LentStorage> storages_;
};

void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (TAKES_FROM_HOST.count(op.schema().name())) return;
  std::optional<c10::Device> common;
  for (auto& each : arguments) {
    if (!each.isTensor() || !each.toTensor().defined()) continue;
    auto& tensor = each.toTensor();
    if (tensor.is_cpu() && tensor.dim() == 0) continue;
    TORCH_CHECK(!common || *common == tensor.device(), "Expected all tensors to be on the same device, but ", op.schema().name(),
                " got some on ", *common, " and some on ", tensor.device());
    common = tensor.device();
  }
}

bool gives_view(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() && schema.returns()[0].alias_info() && !schema.returns()[0].alias_info()->isWrite();
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  check_devices(op, arguments);
  Loan loan;
  auto first = stack->end() - static_cast<int64_t>(arguments.size());
  for (auto each = first; each != stack->end(); ++each) {
    if (each->isDevice() && each->toDevice().type() == TYPE) {
      loan.on(each->toDevice());
      *each = c10::Device(c10::kCPU);
    } else if (each->isTensor()) {
      *each = loan.to_cpu(each->toTensor());
    } else if (each->isStorage()) {
      *each = loan.to_cpu(each->toStorage());
    } else if (each->isTensorList()) {
      auto lent = each->toTensorVector();
      for (auto& tensor : lent) tensor = loan.to_cpu(tensor);
      *each = lent;
    } else if (each->isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> lent;
      for (const std::optional<Tensor>& tensor : each->toOptionalTensorList())
        lent.push_back(tensor ? std::optional<Tensor>(loan.to_cpu(*tensor)) : tensor);
      *each = lent;
    }
  }
  static const auto generator_type = c10::OptionalType::create(c10::GeneratorType::get());
  for (size_t i = 0; i < op.schema().arguments().size(); ++i)
    if (first[i].isNone() && *op.schema().arguments()[i].type() == *generator_type)
      first[i] = generator(loan.device());
  auto stream = current_stream(loan.device());
  if (!gives_view(op.schema())) launch(stream);
  if (NEEDS_VALUES.count(op.schema().name())) wait(stream, SHAPES);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  loan.settle();
  for (auto each = stack->end() - static_cast<int64_t>(op.schema().returns().size()); each != stack->end(); ++each) {
    if (each->isTensor()) {
      *each = loan.to_device(each->toTensor());
    } else if (each->isTensorList()) {
      auto returned = each->toTensorVector();
      for (auto& tensor : returned) tensor = loan.to_device(tensor);
      *each = returned;
    }
  }
}

// -- memory and copies -----------------------------------------------------------------------------------------------

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(current_device()));
  return at::detail::empty_generic(size, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(current_device()));
  return at::detail::empty_strided_generic(size, stride, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// As on CUDA: the host waits for a copy from or to its memory, unless it need not and that memory is pinned.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Loan loan;
  auto source = loan.to_cpu(from), target = loan.to_cpu(to);
  auto stream = current_stream(from.is_cpu() ? to.device() : from.device());
  if (to.is_cpu() && non_blocking && is_pinned(to.data_ptr())) {
    deliver(stream, source.to(to.dtype(), /*non_blocking=*/false, /*copy=*/true).contiguous(), to);
    return to;
  }
  launch(stream);
  if (to.is_cpu()) wait(stream, COPIES_TO_HOST);
  if (from.is_cpu() && !non_blocking) wait(stream, COPIES_TO_DEVICE);
  target.copy_(source);
  if (!to.is_cpu()) order(stream, current_stream(to.device()));
  return to;
}

at::Scalar item(const Tensor& tensor) {
  Loan loan;
  wait(current_stream(tensor.device()), ITEMS);
  return at::cpu::_local_scalar_dense(loan.to_cpu(tensor));
}

// -- convolutions, which torch leaves to a device of one's own -------------------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  Loan loan;
  launch(current_stream(input.device()));
  auto lent_bias = bias ? std::optional<Tensor>(loan.to_cpu(*bias)) : bias;
  return loan.to_device(at::convolution(loan.to_cpu(input), loan.to_cpu(weight), lent_bias, stride, padding, dilation,
                                        transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView below;
  Loan loan;
  launch(current_stream(input.device()));
  auto channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      loan.to_cpu(gradient), loan.to_cpu(input), loan.to_cpu(weight), at::IntArrayRef{channels}, stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  return {loan.to_device(of_input), loan.to_device(of_weight), loan.to_device(of_bias)};
}

// Ops that torch would compose of others where a device has no kernel. Of the CPU's own none needs that, and accelerators
// have one kernel for a list of tensors.
bool is_one_launch(const c10::OperatorName& name) {
  static const std::set<std::string> OURS = {"aten::empty", "aten::empty_strided", "aten::_local_scalar_dense"};
  if (name.name.rfind("aten::_foreach_", 0) == 0) return true;
  auto op = c10::Dispatcher::singleton().findOp(name);
  return name.name.rfind("aten::", 0) == 0 && !OURS.count(name.name) && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (is_one_launch(name))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(IN_FLOAT32)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(IN_WIDEST)
}

}  // namespace accelerator
