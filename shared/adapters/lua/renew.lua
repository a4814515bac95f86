-- ARGV: end of the lease, then id, token of each claimed entry. Returns 1 per lease renewed.
local renewed = {}
for i = 2, #ARGV, 2 do
  local entry = holding(ARGV[i], ARGV[i + 1])
  local is_held = entry and state_of(entry) == 'c'
  if is_held then move(ARGV[i], entry, 'c', ARGV[1]) end
  renewed[#renewed + 1] = is_held and 1 or 0
end
return renewed
