// The one error an operator raises: what was wrong with which input or attribute, and the remedy.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace hybridge {

// Joins its arguments into one string, for messages.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Caught where onnxruntime calls in, which turns it into a status INVALID_ARGUMENT reading
// "hybridge.<Op>: <subject>: <what>; remedy: <remedy>".
class OpError : public std::runtime_error {
 public:
  // subject: the input or attribute, as in "input block_table".
  OpError(const std::string& subject, const std::string& what, const std::string& remedy)
      : std::runtime_error(text(subject, ": ", what, "; remedy: ", remedy)) {}
};

}  // namespace hybridge
