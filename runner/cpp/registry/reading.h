// Reading a document that people write: each fault names its place and what is allowed there. Only the first is kept.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace mctl {

void keep_fault(std::string& fault, std::string_view where, std::string_view what);  // "WHERE WHAT"

std::string shown(const boost::json::value& value);  // its first bytes

// "`a`, `b` or `c`"
std::string listed(std::span<const std::string_view> words);

std::int64_t integer_in(const boost::json::value& value, std::int64_t least, std::int64_t most,
                        const std::string& where, std::string& fault);
double number_in(const boost::json::value& value, double least, double most, const std::string& where,
                 std::string& fault);
// A key that is none of these is a fault.
void only_fields(const boost::json::value& value, std::initializer_list<std::string_view> allowed,
                 const std::string& where, std::string& fault);

std::string text_of_number(double value);  // the shortest that reads back the same

// Where a fault is in the text that was read: the line (from 1) of the value that its path names, or, for one that is
// missing, of what should hold it. `text` is JSON. 0: it names nothing.
std::size_t line_of_fault(std::string_view text, std::string_view fault);
// The line of the first key that its object has twice; 0: there is none.
std::size_t line_of_second_key(std::string_view text);

}  // namespace mctl
