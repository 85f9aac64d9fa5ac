// Text as an axis: it evaluates to what a second evaluator says, or is refused as that one refuses it.
#include "format/expression.h"

#include <array>
#include <optional>
#include <tuple>

#include "check.h"

namespace mctl {
namespace {

using Wide = __int128;  // holds every result of one operation on two 64-bit numbers

const std::vector<Dim> kDims{{"n", 1, 100, 1}, {"seq_len", 1, 1LL << 40, 1}, {"B", 1, 3, 1}, {"q0", 5, 7, 1}};
const std::array<DimSizes, 3> kBound{{{1, 1, 1, 5}, {7, 12, 3, 6}, {100, 1LL << 40, 3, 7}}};

// Precedence climbing straight over the text. Malformed: `sound` is false; without a value: it has no 64-bit result.
class Oracle {
 public:
  Oracle(std::string_view text, const DimSizes& dims) : text_(text), dims_(dims) {}

  std::optional<Wide> run() {
    const auto value = climb(1, 0);
    if (peek() != '\0' || at_ < text_.size()) sound = false;
    return value;
  }

  bool sound = true;

 private:
  char peek() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  // The operator that comes next, and how tightly it binds; '\0': none.
  std::pair<char, int> next_operator() {
    const char c = peek();
    if (c == '+' || c == '-') return {c, 1};
    if (c == '*') return {c, 2};
    return c == '/' && text_.substr(at_).starts_with("//") ? std::pair('/', 2) : std::pair('\0', 0);
  }

  std::optional<Wide> climb(int least, int depth) {
    auto left = operand(depth);
    for (auto [sign, binds] = next_operator(); sound && sign != '\0' && binds >= least;
         std::tie(sign, binds) = next_operator()) {
      at_ += sign == '/' ? 2 : 1;
      const auto right = climb(binds + 1, depth);
      left = left && right ? apply(sign, *left, *right) : std::nullopt;
    }
    return left;
  }

  std::optional<Wide> operand(int depth) {
    const char c = peek();
    if (depth > 16) return malformed();
    if (c == '-') {
      ++at_;
      if (depth == 16) return malformed();
      const auto value = operand(depth + 1);
      return value ? bounded(-*value) : std::nullopt;
    }
    if (c == '(') {
      ++at_;
      if (depth == 16) return malformed();
      const auto value = climb(1, depth + 1);
      if (peek() != ')') return malformed();
      ++at_;
      return value;
    }
    const auto is_digit = [](char d) { return d >= '0' && d <= '9'; };
    const auto is_word = [&](char d) { return is_digit(d) || d == '_' || ((d | 32) >= 'a' && (d | 32) <= 'z'); };
    std::size_t end = at_;
    const bool number = is_digit(c);
    while (end < text_.size() && (number ? is_digit(text_[end]) : is_word(text_[end]))) ++end;
    const auto token = text_.substr(at_, end - at_);
    at_ = end;
    if (token.empty() || (number && token.size() > 15)) return malformed();
    if (number) return std::stoll(std::string(token));
    for (std::size_t i = 0; i < kDims.size(); ++i)
      if (kDims[i].name == token) return dims_[i];
    return malformed();
  }

  static std::optional<Wide> bounded(Wide value) {
    return value < INT64_MIN || value > INT64_MAX ? std::nullopt : std::optional(value);
  }

  static std::optional<Wide> apply(char sign, Wide left, Wide right) {
    if (sign == '+') return bounded(left + right);
    if (sign == '-') return bounded(left - right);
    if (sign == '*') return bounded(left * right);
    if (right == 0) return std::nullopt;
    Wide quotient = left / right;
    if (quotient * right != left && (left < 0) != (right < 0)) --quotient;
    return bounded(quotient);
  }

  std::optional<Wide> malformed() {
    sound = false;
    return std::nullopt;
  }

  std::string_view text_;
  const DimSizes& dims_;
  std::size_t at_ = 0;
};

void check(std::string_view text) {
  const auto parsed = Expression::parse(text, kDims);
  for (const DimSizes& dims : kBound) {
    Oracle oracle(text, dims);
    const auto wanted = oracle.run();
    require(static_cast<bool>(parsed) == (oracle.sound && text.size() <= 256), "both refuse the text, or none");
    if (!parsed) continue;
    const auto value = parsed->evaluate(dims);
    require(value.has_value() == wanted.has_value() && (!value || *value == *wanted), "both have the same value");
    require(value || !parsed->fault(dims).empty(), "a missing value has a reason");
    const auto bounds = parsed->bounds(kDims);
    require(!bounds || (value && bounds->low <= *value && *value <= bounds->high), "the bounds hold every value");
    for (std::size_t dim = 0; dim < kDims.size(); ++dim)
      if (const auto factor = parsed->times(dim))
        require(!wanted || *factor * Wide{dims[dim]} == wanted, "k*dim is k times dim");
    if (const auto dim = parsed->dim()) require(value == dims[*dim], "a dim has its own size");
    if (const auto size = parsed->constant()) require(value == *size, "a constant is itself");
  }
}

}  // namespace
}  // namespace mctl

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mctl::check({reinterpret_cast<const char*>(data), size});
  return 0;
}
