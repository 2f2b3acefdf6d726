#include "emulator/simulation/view.h"

namespace nvep {
namespace simulated {

Views::~Views() {
  for (u32 i = 0; i < spare_.size; ++i) {
    spare_[i]->extras.free_all();
    free(spare_[i]);
  }
  spare_.free_all();
}

View* Views::fresh() {
  View* view;
  if (spare_.size) {
    view = spare_[--spare_.size];
    view->extras.size = 0;
  } else {
    view = static_cast<View*>(calloc(1, sizeof(View) + slots_ * sizeof(u32)));
    if (!view) abort();
  }
  memset(view->clock, 0, slots_ * sizeof(u32));
  view->references = 1;
  return view;
}

View* Views::copy(const View* from) {
  View* view = fresh();
  memcpy(view->clock, from->clock, slots_ * sizeof(u32));
  view->extras.reserve(from->extras.size);
  for (u32 i = 0; i < from->extras.size; ++i) view->extras.push(from->extras[i]);
  return view;
}

void Views::join(View* into, const View* from) {
  if (!from || from == into) return;
  for (u32 i = 0; i < slots_; ++i)
    if (from->clock[i] > into->clock[i]) into->clock[i] = from->clock[i];
  for (u32 i = 0; i < into->extras.size;) {
    if (into->clock[into->extras[i].slot] > into->extras[i].epoch)
      into->extras.swap_out(i);
    else
      ++i;
  }
  for (u32 i = 0; i < from->extras.size; ++i) add(into, from->extras[i]);
}

void Views::add(View* into, const Extra& extra) {
  if (into->clock[extra.slot] > extra.epoch) return;
  for (u32 i = 0; i < into->extras.size; ++i) {
    Extra& known = into->extras[i];
    if (known.slot != extra.slot || known.who != extra.who) continue;
    if (known.epoch < extra.epoch || (known.epoch == extra.epoch && known.releases < extra.releases)) known = extra;
    return;
  }
  into->extras.push(extra);
}

void Views::release(View* view) {
  if (view && --view->references == 0) spare_.push(view);
}

}  // namespace simulated
}  // namespace nvep
