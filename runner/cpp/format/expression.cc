#include "format/expression.h"

#include <algorithm>
#include <array>

namespace mctl {
namespace {

constexpr std::size_t kMaxText = 256;   // characters, and so steps and values on the stack
constexpr std::size_t kMaxDigits = 15;  // of an integer
constexpr int kMaxDepth = 16;           // parentheses and signs inside one another

bool is_digit(char c) { return '0' <= c && c <= '9'; }
bool is_letter(char c) { return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_'; }

std::optional<std::int64_t> divided(std::int64_t left, std::int64_t right) {
  if (right == 0 || (right == -1 && left == INT64_MIN)) return std::nullopt;
  const std::int64_t quotient = left / right;
  return quotient - (left % right != 0 && (left < 0) != (right < 0));
}

template <class Kind>
std::optional<std::int64_t> applied(Kind kind, std::int64_t left, std::int64_t right) {
  std::int64_t result = 0;
  bool overflow = false;
  switch (kind) {
    case Kind::add:
      overflow = __builtin_add_overflow(left, right, &result);
      break;
    case Kind::subtract:
      overflow = __builtin_sub_overflow(left, right, &result);
      break;
    case Kind::multiply:
      overflow = __builtin_mul_overflow(left, right, &result);
      break;
    default:
      return divided(left, right);
  }
  return overflow ? std::nullopt : std::optional(result);
}

// Each operation is monotonic in each operand, as long as no divisor can be zero.
template <class Kind>
std::optional<Interval> applied(Kind kind, Interval left, Interval right) {
  if (kind == Kind::divide && right.low <= 0 && right.high >= 0) return std::nullopt;
  Interval result{INT64_MAX, INT64_MIN};
  for (const std::int64_t a : {left.low, left.high})
    for (const std::int64_t b : {right.low, right.high}) {
      const auto corner = applied(kind, a, b);
      if (!corner) return std::nullopt;
      result = {std::min(result.low, *corner), std::max(result.high, *corner)};
    }
  return result;
}

}  // namespace

class ExpressionParser {
 public:
  ExpressionParser(std::string_view text, std::span<const Dim> dims) : text_(text), dims_(dims) {}

  Result<Expression> parse() {
    if (text_.size() > kMaxText)
      return Error{Code::damaged, "expression of " + std::to_string(text_.size()) + " characters, allowed " +
                                      std::to_string(kMaxText)};
    const bool sound = sum() && (skip_spaces(), at_ == text_.size());
    if (!sound) return Error{Code::damaged, "malformed expression " + quoted_text()};
    if (!undeclared_.empty()) return Error{Code::damaged, quoted_text() + " names a dim that is not declared"};
    result_.text_ = text_;
    return std::move(result_);
  }

 private:
  using Step = Expression::Step;

  std::string quoted_text() const { return '\'' + std::string(text_) + '\''; }

  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  bool take(std::string_view token) {
    skip_spaces();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }

  template <class Test>
  std::string_view take_while(Test test) {
    const auto begin = text_.begin() + static_cast<std::ptrdiff_t>(at_);
    const auto end = std::find_if_not(begin, text_.end(), test);
    at_ += static_cast<std::size_t>(end - begin);
    return {begin, end};
  }

  bool emit(Step::Kind kind, std::int64_t value = 0) {
    result_.steps_.push_back({kind, value});
    return true;
  }

  bool sum() {
    if (!product()) return false;
    while (true) {
      const bool plus = take("+");
      if (!plus && !take("-")) return true;
      if (!product()) return false;
      emit(plus ? Step::add : Step::subtract);
    }
  }

  bool product() {
    if (!factor()) return false;
    while (true) {
      const bool times = take("*");
      if (!times && !take("//")) return true;
      if (!factor()) return false;
      emit(times ? Step::multiply : Step::divide);
    }
  }

  bool factor() {
    if (take("-")) return deeper() && factor() && emit(Step::negate) && depth_-- > 0;
    if (take("(")) return deeper() && sum() && take(")") && depth_-- > 0;
    if (at_ == text_.size()) return false;
    if (is_digit(text_[at_])) return number(take_while(is_digit));
    if (is_letter(text_[at_])) return name(take_while([](char c) { return is_letter(c) || is_digit(c); }));
    return false;
  }

  bool deeper() { return ++depth_ <= kMaxDepth; }

  bool number(std::string_view digits) {
    if (digits.size() > kMaxDigits) return false;
    std::int64_t value = 0;
    for (const char digit : digits) value = 10 * value + (digit - '0');
    return emit(Step::number, value);
  }

  bool name(std::string_view name) {
    for (std::size_t i = 0; i < dims_.size(); ++i)
      if (dims_[i].name == name) return emit(Step::dim, static_cast<std::int64_t>(i));
    undeclared_ = name;
    return emit(Step::number, 0);
  }

  std::string_view text_, undeclared_;
  std::span<const Dim> dims_;
  std::size_t at_ = 0;
  int depth_ = 0;
  Expression result_;
};

Result<Expression> Expression::parse(std::string_view text, std::span<const Dim> dims) {
  return ExpressionParser(text, dims).parse();
}

Expression Expression::fixed(std::int64_t size) {
  Expression result;
  result.text_ = std::to_string(size);
  result.steps_.push_back({Step::number, size});
  return result;
}

// Runs the steps over a stack of values; nullopt as soon as one has none.
template <class Value, class Load, class Apply>
std::optional<Value> Expression::fold(Load load, Apply apply) const {
  std::array<Value, kMaxText> stack;
  std::size_t size = 0;
  for (const Step& step : steps_) {
    std::optional<Value> value;
    if (step.kind <= Step::dim) {
      value = load(step);
    } else if (step.kind == Step::negate) {
      const Value right = stack[--size];
      value = apply(Step::subtract, load(Step{Step::number, 0}), right);
    } else {
      const Value right = stack[--size], left = stack[--size];
      value = apply(step.kind, left, right);
    }
    if (!value) return std::nullopt;
    stack[size++] = *value;
  }
  return stack[0];
}

std::optional<std::int64_t> Expression::evaluate(std::span<const std::int64_t> dims) const {
  if (const auto axis = dim()) return dims[*axis];
  return fold<std::int64_t>(
      [&](Step step) { return step.kind == Step::dim ? dims[static_cast<std::size_t>(step.value)] : step.value; },
      [](Step::Kind kind, std::int64_t left, std::int64_t right) { return applied(kind, left, right); });
}

std::string Expression::fault(std::span<const std::int64_t> dims) const {
  bool by_zero = false;
  fold<std::int64_t>(
      [&](Step step) { return step.kind == Step::dim ? dims[static_cast<std::size_t>(step.value)] : step.value; },
      [&](Step::Kind kind, std::int64_t left, std::int64_t right) {
        by_zero = kind == Step::divide && right == 0;
        return applied(kind, left, right);
      });
  return "expression '" + text_ + (by_zero ? "' divides by zero" : "' has more than 64 bits");
}

std::optional<Interval> Expression::bounds(std::span<const Dim> dims) const {
  return fold<Interval>(
      [&](Step step) {
        if (step.kind == Step::number) return Interval{step.value, step.value};
        const Dim& dim = dims[static_cast<std::size_t>(step.value)];
        return Interval{dim.min, dim.max};
      },
      [](Step::Kind kind, Interval left, Interval right) { return applied(kind, left, right); });
}

bool Expression::uses(std::size_t dim) const {
  return std::any_of(steps_.begin(), steps_.end(), [dim](Step step) {
    return step.kind == Step::dim && static_cast<std::size_t>(step.value) == dim;
  });
}

std::optional<std::size_t> Expression::dim() const {
  if (steps_.size() != 1 || steps_[0].kind != Step::dim) return std::nullopt;
  return static_cast<std::size_t>(steps_[0].value);
}

bool Expression::uses_dims() const {
  return std::any_of(steps_.begin(), steps_.end(), [](Step step) { return step.kind == Step::dim; });
}

std::optional<std::int64_t> Expression::constant() const {
  if (steps_.size() == 1 && steps_[0].kind == Step::number) return steps_[0].value;
  return uses_dims() ? std::nullopt : evaluate({});
}

std::optional<std::int64_t> Expression::times(std::size_t wanted) const {
  constexpr std::int64_t most = 999'999'999;
  std::int64_t factor = 1;
  int before = 0, after = 0, dims = 0;  // numbers before and after the dim, times that the dim is there
  for (const Step& step : steps_) {
    if (step.kind == Step::multiply) continue;
    if (step.kind == Step::dim && static_cast<std::size_t>(step.value) == wanted) {
      ++dims;
    } else if (step.kind == Step::number && 1 <= step.value && step.value <= most) {
      if (++(dims == 0 ? before : after) > 1) return std::nullopt;
      factor *= step.value;
    } else {
      return std::nullopt;
    }
  }
  return dims == 1 && text_.find('(') == std::string::npos ? std::optional(factor) : std::nullopt;
}

}  // namespace mctl
