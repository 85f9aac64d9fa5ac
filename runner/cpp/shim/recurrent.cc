// One layer of an LSTM in one direction, as torch calls it for a CPU: mkldnn_rnn_layer.
#include "product.h"

namespace mctl::shim {
namespace {

constexpr auto kName = "mkldnn_rnn_layer";
constexpr std::int64_t kLstm = 2;  // of torch's modes

struct Layer {
  const Tensor *x, *by_input, *by_hidden, *input_bias, *hidden_bias, *hidden, *cell;  // biases may be null
  bool reverse;

  std::int64_t steps() const { return x->sizes[0]; }
  std::int64_t batch() const { return x->sizes[1]; }
  std::int64_t inputs() const { return x->sizes[2]; }
  std::int64_t size() const { return by_hidden->sizes[1]; }
};

template <class E>
class Lstm {
 public:
  using T = Sum<E>;

  Lstm(const Layer& layer, const Tensor& out, const Tensor& hidden, const Tensor& cell)
      : layer_(layer), out_(out), hidden_(hidden), cell_(cell), tiles_(tiles_for<T>()) {}

  AOTITorchError run() const {
    const std::int64_t n = layer_.batch(), h = layer_.size(), rows = layer_.steps() * n, inputs = layer_.inputs();
    const std::int64_t columns = wide();
    const Scratch packed(columns, (inputs + h + 1) * std::int64_t{sizeof(T)});
    const Scratch states(n, (2 * h + columns) * std::int64_t{sizeof(T)});
    const Scratch read(rows, (inputs + columns) * std::int64_t{sizeof(T)});
    if (!packed || !states || !read) return kFailed;
    T *const by_input = packed.at<T>(), *const by_hidden = by_input + columns * inputs;
    T* const bias = by_hidden + columns * h;
    T *const hidden = states.at<T>(), *const cell = hidden + n * h, *const sums = cell + n * h;
    T *const x = read.at<T>(), *const from_input = x + rows * inputs;
    pack_panels(turned(*layer_.by_input), inputs, 4 * h, tiles_.columns, by_input);
    pack_panels(turned(*layer_.by_hidden), h, 4 * h, tiles_.columns, by_hidden);
    for (std::int64_t j = 0; j < 4 * h; ++j) bias[j] = bias_of(layer_.input_bias, j) + bias_of(layer_.hidden_bias, j);
    const auto& at = layer_.x->strides;
    for (std::int64_t row = 0; row < rows; ++row)
      pack_row(elements<E>(*layer_.x) + row / n * at[0] + row % n * at[1], at[2], inputs, x + row * inputs);
    read_states(*layer_.hidden, hidden);
    read_states(*layer_.cell, cell);
    multiply(rows, inputs, x, by_input, from_input);
    for (std::int64_t i = 0; i < layer_.steps(); ++i) {
      const std::int64_t step = layer_.reverse ? layer_.steps() - 1 - i : i;
      multiply(n, h, hidden, by_hidden, sums);
      for (std::int64_t row = 0; row < n; ++row)
        update(sums + row * columns, from_input + (step * n + row) * columns, bias, hidden + row * h, cell + row * h);
      for (std::int64_t j = 0; j < n * h; ++j) elements<E>(out_)[step * n * h + j] = cast<E>(hidden[j]);
    }
    for (std::int64_t j = 0; j < n * h; ++j) {
      elements<E>(hidden_)[j] = cast<E>(hidden[j]);
      elements<E>(cell_)[j] = cast<E>(cell[j]);
    }
    return kDone;
  }

 private:
  std::int64_t wide() const { return (4 * layer_.size() + tiles_.columns - 1) / tiles_.columns * tiles_.columns; }

  static Strided<const E> turned(const Tensor& weight) {
    return {elements<E>(weight), weight.strides[1], weight.strides[0]};
  }

  static T bias_of(const Tensor* bias, std::int64_t at) {
    return bias == nullptr ? T(0) : cast<T>(elements<E>(*bias)[at * bias->strides[0]]);
  }

  void read_states(const Tensor& from, T* to) const {
    for (std::int64_t row = 0; row < layer_.batch(); ++row)
      pack_row(elements<E>(from) + row * from.strides[1], from.strides[2], layer_.size(), to + row * layer_.size());
  }

  void multiply(std::int64_t rows, std::int64_t k, const T* a, const T* panels, T* out) const {
    const std::int64_t count = wide() / tiles_.columns;
    const int threads = threads_for(static_cast<double>(rows) * static_cast<double>(k * wide()) / 2);
    share_out(threads, count, [&](std::int64_t panel, int) {
      multiply_panel(tiles_, rows, k, a, k, panels + panel * k * tiles_.columns, tiles_.columns,
                     out + panel * tiles_.columns, wide());
    });
  }

  // Of one row: the gates input, forget, cell and output lie side by side.
  void update(T* gates, const T* from_input, const T* bias, T* hidden, T* cell) const {
    const std::int64_t h = layer_.size();
    for (std::int64_t j = 0; j < 4 * h; ++j) gates[j] += from_input[j] + bias[j];
    T *const input = gates, *const forget = gates + h, *const fresh = gates + 2 * h, *const output = gates + 3 * h;
    for (T* const gate : {input, forget, output}) exponentials(gate, h, T(-1), T(0));
    hyperbolic(fresh, h);
    for (std::int64_t j = 0; j < h; ++j) {
      cell[j] = cell[j] / (1 + forget[j]) + fresh[j] / (1 + input[j]);
      hidden[j] = cell[j];
    }
    hyperbolic(hidden, h);
    for (std::int64_t j = 0; j < h; ++j) hidden[j] /= 1 + output[j];
  }

  // tanh x = 1 - 2 / (e^2x + 1)
  static void hyperbolic(T* x, std::int64_t count) {
    exponentials(x, count, T(2), T(0));
    for (std::int64_t j = 0; j < count; ++j) x[j] = 1 - 2 / (x[j] + 1);
  }

  const Layer& layer_;
  const Tensor &out_, &hidden_, &cell_;
  const Tiles<T>& tiles_;
};

bool has_shape(const Tensor* tensor, std::initializer_list<std::int64_t> sizes) {
  return tensor == nullptr || (tensor->rank == static_cast<std::int32_t>(sizes.size()) &&
                               std::equal(sizes.begin(), sizes.end(), tensor->sizes));
}

AOTITorchError check(const Layer& layer) {
  if (layer.x->rank != 3 || layer.by_hidden->rank != 2)
    return fail("`%s` of an input of %d axes", kName, layer.x->rank);
  const std::int64_t n = layer.batch(), h = layer.size(), gates = layer.by_hidden->sizes[0];
  if (gates % 4 != 0 || gates / 4 != h || !has_shape(layer.by_input, {gates, layer.inputs()}) ||
      !has_shape(layer.input_bias, {gates}) || !has_shape(layer.hidden_bias, {gates}) ||
      !has_shape(layer.hidden, {1, n, h}) || !has_shape(layer.cell, {1, n, h}))
    return fail("`%s` of shapes that do not fit", kName);
  for (const Tensor* tensor :
       {layer.by_input, layer.by_hidden, layer.input_bias, layer.hidden_bias, layer.hidden, layer.cell})
    if (tensor != nullptr && same_dtype(kName, *layer.x, *tensor) != kDone) return kFailed;
  return kDone;
}

}  // namespace

MCTL_EXPORT AOTITorchError aoti_torch_cpu_mkldnn_rnn_layer(Handle input, Handle weight0, Handle weight1, Handle weight2,
                                                           Handle weight3, Handle hx, Handle cx, std::int32_t reverse,
                                                           const std::int64_t*, std::int64_t batch_sizes,
                                                           std::int64_t mode, std::int64_t, std::int64_t num_layers,
                                                           std::int32_t has_biases, std::int32_t bidirectional,
                                                           std::int32_t batch_first, std::int32_t train, Handle* result,
                                                           Handle* hidden, Handle* cell, Handle* workspace) {
  if (mode != kLstm || num_layers != 1 || bidirectional != 0 || batch_first != 0 || train != 0 || batch_sizes != 0)
    return fail("mctl's shim has `%s` for one layer of an LSTM in one direction only", kName);
  Layer layer{find(input), find(weight0), find(weight1), nullptr, nullptr, find(hx), find(cx), reverse != 0};
  for (const Tensor* tensor : {layer.x, layer.by_input, layer.by_hidden, layer.hidden, layer.cell})
    if (tensor == nullptr) return kFailed;
  if (has_biases != 0) {
    layer.input_bias = find(weight2);
    layer.hidden_bias = find(weight3);
    if (layer.input_bias == nullptr || layer.hidden_bias == nullptr) return kFailed;
  }
  if (check(layer) != kDone) return kFailed;
  AOTITorchError done = kFailed;
  const bool known = with_float_type(layer.x->dtype, [&]<class E>(E*) {
    const std::int64_t states[] = {layer.steps(), layer.batch(), layer.size()}, none = 0;
    const std::int64_t last[] = {1, states[1], states[2]};
    Handle made[4] = {};
    bool have = make_rows(3, states, layer.x->dtype, &made[0]) == kDone;
    have = have && make_rows(3, last, layer.x->dtype, &made[1]) == kDone;
    have = have && make_rows(3, last, layer.x->dtype, &made[2]) == kDone;
    have = have && make_rows(1, &none, 0, &made[3]) == kDone;
    if (have) done = Lstm<E>(layer, *find(made[0]), *find(made[1]), *find(made[2])).run();
    if (done != kDone) {
      for (Handle handle : made)
        if (handle != nullptr) remove(handle);
      return;
    }
    *result = made[0];
    *hidden = made[1];
    *cell = made[2];
    *workspace = made[3];
  });
  return known ? done : refuse_dtype(kName, layer.x->dtype);
}

}  // namespace mctl::shim
