// Keeps the name of this visit as long as the tab is open.
(visit) => { try { sessionStorage.setItem('vat-visit', visit); } catch { /* the next load begins anew */ } }
