// An axis of a tensor: a fixed size, a dim, or (outputs only) an expression over dims, compiled to postfix.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/result.h"

namespace mctl {

struct Dim {
  std::string name;
  std::int64_t min = 1, max = 1, multiple = 1;
};

// Sizes of the contract's dims, in the contract's order.
using DimSizes = std::vector<std::int64_t>;

struct Interval {
  std::int64_t low, high;
};

class Expression {
 public:
  // Grammar: sum = product (("+"|"-") product)*; product = factor (("*"|"//") factor)*;
  // factor = integer | name | "-" factor | "(" sum ")", with spaces between tokens. `//` rounds down.
  static Result<Expression> parse(std::string_view text, std::span<const Dim> dims);
  static Expression fixed(std::int64_t size);

  std::optional<std::int64_t> evaluate(std::span<const std::int64_t> dims) const;  // nullopt: overflow, division by 0
  std::string fault(std::span<const std::int64_t> dims) const;                     // why evaluate() gave nothing
  std::optional<Interval> bounds(std::span<const Dim> dims) const;  // holds every value over the dims' ranges
  bool uses(std::size_t dim) const;
  bool uses_dims() const;
  std::optional<std::size_t> dim() const;                    // set when the axis is just a dim
  std::optional<std::int64_t> constant() const;              // set when the axis is fixed
  std::optional<std::int64_t> times(std::size_t dim) const;  // k in `dim`, `k*dim`, `dim*k` and `k*dim*m` (k*m)
  const std::string& text() const { return text_; }

 private:
  friend class ExpressionParser;
  struct Step {
    enum Kind : std::uint8_t { number, dim, add, subtract, multiply, divide, negate } kind;
    std::int64_t value;
  };
  template <class Value, class Load, class Apply>
  std::optional<Value> fold(Load load, Apply apply) const;

  std::string text_;
  std::vector<Step> steps_;
};

}  // namespace mctl
