// A device for tests whose work is computed at once, by the CPU's kernels, and is done later.
//
// Time is counted in launches, so that a test decides what has happened: what is launched is done `latency` ticks
// later. Until then its event has not happened, its copy has not arrived, and whoever asks for its value waits, which
// moves the clock to that moment. Everything that makes the host wait is counted.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

namespace accelerator {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int STREAMS = 4;

// What a test can ask for the number of; `accelerator/__init__.py` has the same names in the same order.
enum Count { LAUNCHES, ITEMS, COPIES_TO_HOST, COPIES_TO_DEVICE, SHAPES, EVENTS, STREAM_WAITS, COUNTS };

c10::Device current_device();
c10::Stream current_stream(c10::Device device);
c10::Allocator* memory();
const at::Generator& generator(c10::Device device);
bool is_pinned(const void* pointer);

// Work is launched on a stream.
void launch(c10::Stream stream);
// What is launched on `later` from now on comes after all that was launched on `earlier`.
void order(c10::Stream earlier, c10::Stream later);
// The host waits for all that was launched on a stream.
void wait(c10::Stream stream, Count why);
// The bytes of `from` will be in `to`, memory of the host, when all that was launched on a stream is done.
void deliver(c10::Stream stream, const at::Tensor& from, const at::Tensor& to);

}  // namespace accelerator
